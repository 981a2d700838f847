"""The supervised connection: one client at a time, replaced and never repaired."""
