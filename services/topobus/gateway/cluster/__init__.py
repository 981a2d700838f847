"""The gateway's use of the API server: slices, claims, this node's pods and their events."""
