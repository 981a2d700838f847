"""The API server as we use it: how it is reached, who we are there, requests and watches in plain
JSON. The Kubernetes client library is imported nowhere else.
"""
