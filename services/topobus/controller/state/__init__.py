"""Copies of stored objects, updated by watches: machines, inventories, ledgers, API objects, and
indexes derived from them. No I/O; mutable.
"""
