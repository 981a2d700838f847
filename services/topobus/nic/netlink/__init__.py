"""Changes network interfaces by netlink: reads them, hands them over to a pod's network namespace,
takes them back, and configures virtual functions.
"""
