"""RDMA devices: netlink's messages, and the hand-over to a pod's namespace."""
