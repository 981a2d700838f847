"""The pure part of the command line's checks."""
