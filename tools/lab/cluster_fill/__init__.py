"""A cluster that is filled with gated pods: the nodes' side of the bus, the pods and their binding,
for the benchmark `cluster` and its test.
"""
