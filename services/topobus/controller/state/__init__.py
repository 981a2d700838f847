"""Copies of what others wrote, kept as it changes: machines, inventories, ledgers, objects, and what follows from them. No I/O; not frozen."""
