"""Cards that are cut for a claim, and restored afterwards."""
