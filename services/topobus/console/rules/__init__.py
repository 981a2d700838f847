"""What the page shows, as pure functions over frozen values; who may look at it, too."""
