"""The hint-merging topology service: owns the ledger."""
