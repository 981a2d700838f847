"""The relay: says to the hub what its node's own server stores, and keeps there the claims that the hub says."""
