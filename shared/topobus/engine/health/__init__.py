"""How a device's health changes, and how the drivers' reports become the list of a class's
devices.
"""
