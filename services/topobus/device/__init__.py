"""The device service for a class that Topobus has no service of its own for: drivers of other
packages bring the devices.
"""
