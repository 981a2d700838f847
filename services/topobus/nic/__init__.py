"""The NIC device service."""
