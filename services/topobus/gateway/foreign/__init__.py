"""Device plugins of others behind our gateway."""
