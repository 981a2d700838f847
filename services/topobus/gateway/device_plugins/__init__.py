"""kubelet's device plugin API and PodResources, as kubelet calls and answers them."""
