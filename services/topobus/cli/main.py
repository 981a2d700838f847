"""Start `topobus`, or say which package is missing: the base installation has what services need, not what the operator's program needs."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit."""
    try:
        from topobus.cli.application import run
    except ModuleNotFoundError as err:
        print(f"error: topobus needs {err.name}, which is not installed\n  next: pip install 'topobus[cli]'", file=sys.stderr)
        sys.exit(78)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
