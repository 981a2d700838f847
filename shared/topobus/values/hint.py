"""A hint: NUMA nodes from which a resource could be served, and whether that is as narrow as the
resource allows.

Semantics are kubelet's (pkg/kubelet/cm/topologymanager): `nodes` None means "no NUMA opinion".
"""

from __future__ import annotations

from msgspec import Struct

from topobus.values.idset import NodeSet

__all__ = ["Hint"]


class Hint(Struct, frozen=True):
    """One way to serve a resource."""

    nodes: NodeSet | None
    preferred: bool

    @property
    def text(self) -> str:
        """Write it as kubelet's logs do: the nodes, and a star when it is preferred.

        >>> Hint(NodeSet(0, 1), False).text, Hint(None, True).text
        ('{0-1}', '{any}*')
        """
        return f"{{{self.nodes if self.nodes is not None else 'any'}}}{'*' if self.preferred else ''}"
