"""Contract suites that drivers of vendors pass, and a driver for tests of the host."""
