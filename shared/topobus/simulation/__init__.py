"""Simulated parts that production uses: recorded machines, a NATS launcher, the kubelet of the
demo.
"""

import os

# The kubelet simulator's peers come and go; gRPC's C core would write a line for each. It
# reads this once, when it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
