"""Which devices serve a claim: the search and its parts, as pure functions over frozen values."""
