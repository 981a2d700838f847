"""The gateway: kubelet's sockets, CDI files and the node checkpoint."""

import os

# gRPC's C core writes each GOAWAY of a peer to standard error, which is an ordinary thing when
# kubelet restarts. It reads this once, when it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
