"""The controller as the API server of its own objects: claims and pods
that Topobus itself stores.
"""
