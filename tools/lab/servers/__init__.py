"""Real NATS servers as tests take them: lent by the account, in a cluster, and in the shapes of a
fleet.
"""
