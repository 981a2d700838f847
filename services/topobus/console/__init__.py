"""The console: one page in a browser with the fleet, its health, what waits and why.

It reads the bus and writes nothing.
"""
