"""A node in memory: placements and claims without running services."""
