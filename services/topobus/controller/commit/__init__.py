"""What both homes of the controller have in common: find an allocation, write it to the ledger,
take it back.
"""
