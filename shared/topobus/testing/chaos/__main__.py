"""`python -m topobus.testing.chaos`: proof by faults, as a program."""

from topobus.testing.chaos.command import main

if __name__ == "__main__":
    raise SystemExit(main())
