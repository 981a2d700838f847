"""The merge of hints: rules for masks of NUMA nodes, and three strategies that find the mask
kubelet's Topology Manager would choose.
"""
