"""The project's own laboratory: benchmarks, chaos runs, simulated fleets, and Kubernetes' recorded
answers held against ours.

It stands above everything: it imports any package of the house, none imports it, and it is in no
wheel and no image. It runs from a checkout (`make bench`, `make chaos`). What authors of drivers,
plugins and clients test with is `topobus.testing`.
"""

import os

# Modules import gRPC before any package of ours: its C core would write a line for each peer that
# goes. It reads this once, when it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
