"""Drivers of class nic, one file a vendor."""
