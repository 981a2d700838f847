"""The FPGA device service."""
