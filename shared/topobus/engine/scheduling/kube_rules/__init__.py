"""kube-scheduler's own rules for a pod. Start with `placement_rules`."""
