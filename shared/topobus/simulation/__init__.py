"""What production needs of a machine that is not there: recorded machines, a NATS launcher, the kubelet of the demo."""

import os

# The kubelet simulator's peers come and go; gRPC's C core would write a line for each. It reads this once, when it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
