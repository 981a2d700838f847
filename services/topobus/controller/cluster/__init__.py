"""The controller's home in a Kubernetes cluster: informers, writes, and the pods that wait behind our scheduling gate."""
