"""Drivers of class cpu, one file a vendor."""
