"""The pure part of a dry run: a situation in, answers out."""
