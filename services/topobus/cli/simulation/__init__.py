"""A node in memory: placements and claims tried without services."""
