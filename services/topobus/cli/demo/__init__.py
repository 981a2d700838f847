"""The demo: the main job of Topobus on a recorded 8-GPU machine, every step checked; `topobus demo`, `make demo`."""

from topobus.cli.demo.run import demo

__all__ = ["demo"]
