"""CPUs: their place in the machine, the hints for them, and which of them kubelet's static policy
takes.
"""
