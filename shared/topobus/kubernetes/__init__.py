"""Access to the Kubernetes API server: configuration, identity, requests and watches in plain JSON.

The Kubernetes client library is imported nowhere else.
"""
