"""CPUs: where they sit, the hints for them, and which of them kubelet's static policy takes."""
