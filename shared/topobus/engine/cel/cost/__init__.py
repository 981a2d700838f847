"""The cost of an expression: estimated before it is evaluated, and counted while it is."""
