"""The relay: says to the hub what its node's own server stores."""
