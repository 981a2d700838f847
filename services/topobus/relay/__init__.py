"""The relay: copies to the hub what its node's own server stores."""
