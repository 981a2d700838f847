"""What the gateway reads and writes at the API server: slices, claims, this node's pods and their
events.
"""
