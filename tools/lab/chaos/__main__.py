"""`python -m lab.chaos`: proof by faults, as a program."""

from lab.chaos.command import main

if __name__ == "__main__":
    raise SystemExit(main())
