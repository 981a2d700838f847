"""The rules of the ledger: what may be written, what an owner holds, and what prevents a change."""
