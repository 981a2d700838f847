"""NVIDIA's management library behind one client."""
