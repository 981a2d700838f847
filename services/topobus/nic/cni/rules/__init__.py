"""The pure part of CNI: a chain's messages and its refusals."""
