"""`python -m topobus.testing.kubelet serve|replay`: the kubelet simulator as a program."""

from topobus.testing.kubelet.command import main

if __name__ == "__main__":
    raise SystemExit(main())
