"""What both homes of the controller do alike: find an allocation, write it to the ledger, take it
back.
"""
