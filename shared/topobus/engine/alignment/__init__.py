"""Alignment: hints, their merge, and the choice of CPUs and devices, as pure functions over frozen
values.

`planning` places whole pods. It asks `cpus`, `devices` and `memory` for hints and for the units
that are taken, and `merge` for the hint that all resources share. In the order of this paragraph
each imports only those after it, which the linter checks. Nothing in this room reads a clock, a
file or the bus.
"""
