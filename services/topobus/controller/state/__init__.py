"""Copies of stored objects, updated by watches: machines, inventories, ledgers, API objects, and
indexes derived from them. They are mutable and do no I/O.
"""
