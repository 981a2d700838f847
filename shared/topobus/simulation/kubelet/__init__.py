"""A kubelet without a cluster: kubelet 1.36's order, limits and wording over real gRPC on real unix
sockets.
"""
