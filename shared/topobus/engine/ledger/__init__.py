"""The rules of the ledger: what may be written, what an owner holds, and what stands in the way of
a change.
"""
