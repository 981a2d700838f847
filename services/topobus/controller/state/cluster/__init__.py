"""The part of the state that only the cluster home has."""
