"""MIG: NVIDIA GPUs that are cut into instances, by an administrator beforehand or for each
claim.
"""
