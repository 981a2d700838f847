"""What the page shows, as pure functions over frozen values, and the rules of access to it."""
