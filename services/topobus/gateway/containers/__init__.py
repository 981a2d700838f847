"""The container runtime's plugin interface (NRI): what the gateway sees of sandboxes and
containers, and what it changes in them.
"""
