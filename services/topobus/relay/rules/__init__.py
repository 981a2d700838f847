"""What must be said to the hub next, as pure functions."""
