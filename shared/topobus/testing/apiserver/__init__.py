"""A Kubernetes API server for tests of controllers and DRA drivers: real HTTP on loopback, no
cluster, no etcd, nothing to install.
"""

from topobus.testing.apiserver.simulator import RESOURCES, ApiError, ApiRequest, ApiServerSimulator, Object, Right

__all__ = ["RESOURCES", "ApiError", "ApiRequest", "ApiServerSimulator", "Object", "Right"]
