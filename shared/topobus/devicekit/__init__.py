"""The kit for device services: driver protocol, host process, plugin registry, health
machine, CDI.
"""
