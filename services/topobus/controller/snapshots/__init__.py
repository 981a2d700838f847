"""Answers from a snapshot of a cluster, without any write: why a pod has no node, what is free, what
would have to move, what other objects would change.
"""
