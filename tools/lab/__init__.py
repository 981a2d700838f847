"""The project's own laboratory: benchmarks, chaos runs, simulated fleets, and recorded answers of
Kubernetes compared with ours, and the NATS servers that tests take, real and in memory.

It may import any package of the project. No package imports it, and it is in no wheel and no image.
It runs from a checkout (`make bench`, `make chaos`). Authors of drivers, plugins and clients test
with `topobus.testing`.
"""

import os

# Modules import gRPC before any package of ours: its C core would write a line for each peer that
# disconnects. It reads this once, when it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
