"""The part of the state that only a cluster has."""
