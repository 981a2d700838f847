"""`python -m lab.bench GROUP`: measures what the architecture gives budgets for."""

from lab.bench.groups import main

if __name__ == "__main__":
    raise SystemExit(main())
