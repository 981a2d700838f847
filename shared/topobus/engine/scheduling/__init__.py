"""Which node a pod goes to: what fits, how nodes are ranked, and why a node is left out."""
