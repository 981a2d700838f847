"""A fleet of nodes without their services: one process that answers for all of them on the bus,
claims for it, and the result that a fill must have.
"""
