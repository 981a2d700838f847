"""The gateway: speaks all of kubelet's gRPC."""
