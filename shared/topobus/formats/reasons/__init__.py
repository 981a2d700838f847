"""The catalogue of reason codes: what each says, and which facts come with it."""
