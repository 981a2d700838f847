"""Alignment: hints, their merge, and the choice of CPUs and devices, as pure functions over frozen values."""
