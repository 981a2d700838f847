"""What was done to each device, on disk, so that a crash leaves nothing unknown."""
