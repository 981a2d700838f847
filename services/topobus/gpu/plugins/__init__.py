"""Drivers of class gpu, one file a vendor."""
