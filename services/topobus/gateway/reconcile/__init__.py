"""The ledger held against kubelet's PodResources, and corrected."""
