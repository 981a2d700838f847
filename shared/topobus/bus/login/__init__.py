"""Passwords and certificates: as whom a connection comes, and whom it trusts."""
