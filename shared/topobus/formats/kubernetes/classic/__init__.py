"""Classic DRA on the wire (resource.k8s.io/v1alpha2) and its migration to structured parameters."""
