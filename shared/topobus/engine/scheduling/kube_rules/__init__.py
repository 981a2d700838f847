"""kube-scheduler's own rules for a pod: `placement_rules` is the entrance."""
