"""A kubelet for tests of device plugins and DRA drivers: no cluster, real gRPC on real unix
sockets, kubelet 1.36's order, limits and wording.

`topobus.simulation.kubelet.simulator` lists what it has and what it lacks. This package has what
only tests need: a plugin and a driver that record each call, recorded conversations of a real
kubelet, and their replay. `python -m topobus.testing.kubelet` serves or replays.
"""

from topobus.simulation.kubelet.simulator import *  # noqa: F403  # exactly the simulator's public names, which are listed there alone
