"""MIG: NVIDIA GPUs that are cut into instances, by somebody beforehand or for each claim."""
