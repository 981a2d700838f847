"""The device service for a class that has no service of its own in Topobus: drivers of other
packages find its devices.
"""
