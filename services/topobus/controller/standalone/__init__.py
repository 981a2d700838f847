"""The stand-alone home: the controller as the API server of the claims and pods that Topobus itself
stores.
"""
