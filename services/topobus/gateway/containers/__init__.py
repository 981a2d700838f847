"""The container runtime's plugin interface (NRI): what the gateway reads about sandboxes and
containers, and what it changes in them.
"""
