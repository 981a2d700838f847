"""Manifests and objects of the stand-alone API, as users name and write them."""
