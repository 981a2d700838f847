"""Which node suits a pod with claims, by the extension points of kube-scheduler's dynamic-resources plugin. Pure."""
