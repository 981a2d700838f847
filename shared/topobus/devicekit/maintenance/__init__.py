"""What an operator wants of one device: withhold it, offer it again, reset it."""
