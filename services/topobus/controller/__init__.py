"""The allocation controller."""
