"""Classic DRA's decisions: selectors, device choice, the claim's lifecycle and the negotiation of a
pod's node.

Pure.
"""
