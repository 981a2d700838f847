"""Cards that are cut for a claim, and put together again afterwards."""
