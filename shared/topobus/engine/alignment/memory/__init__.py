"""Memory and huge pages: the free memory of each NUMA node, and the memory that kubelet's static
memory policy takes.
"""
