"""PCI functions for virtual machines: from their own driver to VFIO, and back."""
