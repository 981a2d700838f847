"""The catalogue of reason codes: the meaning of each, and the facts that come with it."""
