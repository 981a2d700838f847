"""Memory and huge pages: what is free on each NUMA node, and what kubelet's static memory policy
takes.
"""
