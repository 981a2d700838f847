"""How a device's health changes, and how what drivers report becomes the
list of a class's devices.
"""
