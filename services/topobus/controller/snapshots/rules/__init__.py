"""The pure part: a snapshot in, an answer out."""
