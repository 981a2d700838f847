"""Contract suites for vendors' drivers, and a driver for tests of the device host."""
