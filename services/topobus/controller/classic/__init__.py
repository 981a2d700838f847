"""Classic DRA (resource.k8s.io/v1alpha2): the controller for classic drivers, our own driver, and
the scheduler's part of the negotiation.
"""
