"""Compares the ledger with kubelet's PodResources, and corrects it."""
