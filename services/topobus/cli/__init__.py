"""The operator's command, topobus."""
