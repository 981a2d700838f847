"""Alignment: hints, their merge, and the choice of CPUs and devices, as pure functions over frozen
values.

`planning` places whole pods. It asks `cpus`, `devices` and `memory` for hints and for what is
taken, and `merge` for the hint that all resources share. Each imports only what stands after it
here, which the linter checks. Nothing in this room reads a clock, a file or the bus.
"""
