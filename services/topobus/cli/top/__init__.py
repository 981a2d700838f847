"""`topobus top`: the drawing of machines, live."""
