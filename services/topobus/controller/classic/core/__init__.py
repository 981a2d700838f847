"""Classic DRA's decisions: selectors, choices of devices, the life of a claim and the negotiation over a pod's node. Pure."""
