"""What an operator wants of one device: kept back, given back, reset."""
