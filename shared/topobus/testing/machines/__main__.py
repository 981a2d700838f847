"""`python -m topobus.testing.machines`: the same command as `python -m
topobus.simulation.machines`.
"""

from topobus.simulation.machines.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main())
