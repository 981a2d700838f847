"""The gateway: kubelet's sockets, CDI files and the node checkpoint."""

import os

# gRPC's C core writes each GOAWAY of a peer to standard error, although GOAWAYs are ordinary when
# kubelet restarts. It reads this variable once, when it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
