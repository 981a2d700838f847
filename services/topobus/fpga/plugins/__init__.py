"""Drivers of class fpga, one file a vendor."""
