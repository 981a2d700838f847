"""Laws of FPGAs: whatever a claim asks for, no container gets a management node, and no card is
programmed under a user; the gateway refuses a management node that a driver gave.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from support.bitstream_files import gbs, xclbin
from support.fpga_cards import FileDflProgrammer, FileXrtProgrammer, add, dfl_machine
from support.laws import examples
from topobus.devicekit.device_record import DeviceRecord, RecordState
from topobus.devicekit.driver import LongWork, PrepareContext
from topobus.devicekit.settings import PartitionSettings
from topobus.formats.messages.messages import Prepared
from topobus.fpga.config import FunctionSettings
from topobus.fpga.host_services import FpgaServices
from topobus.fpga.plugins.intel_dfl import IntelDflDriver
from topobus.fpga.plugins.xilinx import XilinxDriver
from topobus.gateway.containers.rules.edit_limits import NO_RIGHTS, refuse_forbidden, rights_of
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import DeviceRole
from topobus.values.edits import ContainerEdits, DeviceNode
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

MANAGEMENT = ("dfl-fme", "xclmgmt")
RIGHTS = rights_of("fpga", NO_RIGHTS, is_foreign=False)


class Asked(Struct, frozen=True):
    """One claim, on a service of these settings."""

    function: str
    namespace: str
    can_program: bool
    has_store: bool
    is_shared: bool
    """Whether somebody else has the card."""
    looks_only: bool
    offers_parents: bool


asked_claims = st.builds(
    Asked,
    st.sampled_from(["", "matrix", "filter", "blank", "nothing", "d8424dc4a4a3c413f89e433683f9040b", "BAD NAME"]),
    st.sampled_from(["team-a", "team-b"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A machine with a card of each maker, of which Intel's has two ports by the hardware, and a
    store for both.
    """
    folder = tmp_path_factory.mktemp("management")
    dfl_machine(folder / "machine")
    add(folder / "store", gbs(), "matrix", ("team-a",))
    add(folder / "store", xclbin(), "filter")
    add(folder / "store", gbs("b1a4c0de" * 4), "blank", is_blank=True)
    return folder / "machine"


def calls(root: Path) -> list[str]:
    """List what was done to the cards so far; both programmers write one list."""
    return FileDflProgrammer(root).calls


@settings(max_examples=examples(60), deadline=None)
@given(history=st.lists(asked_claims, min_size=1, max_size=4))
def test_no_container_gets_a_management_node(root: Path, history: list[Asked]) -> None:
    """Cards are programmed, blanked, refused and given in any order: what a container gets are
    ports and render nodes.
    """
    tree = Tree(HardwareSettings(root=str(root)))
    for driver in (IntelDflDriver(FileDflProgrammer(root)), XilinxDriver(FileXrtProgrammer(root))):
        for number, asked in enumerate(history):
            store = str(root.parent / "store") if asked.has_store else ""
            partitions = PartitionSettings(parents="counted" if asked.offers_parents else "hidden")
            functions = FunctionSettings(store=store)
            driver.configure(FpgaServices(partitions=partitions, functions=functions, can_program=asked.can_program))
            devices = driver.discover(tree, read_machine(tree, "n")).devices
            owner = Owner(kind=OwnerKind.CLAIM, namespace=asked.namespace, name="c", uid=f"u{number}")
            config: tuple[dict[str, Any], ...] = (
                ({"apiVersion": "fpga.topobus.dev/v1", "kind": "FunctionParameters", "function": asked.function},)
                if asked.function
                else ()
            )
            names = frozenset(device.name for device in devices)
            context = PrepareContext(
                owner=owner,
                config=config,
                records={name: DeviceRecord(RecordState(owner=owner)) for name in names},
                others={name: (RecordState(),) for name in names} if asked.is_shared else {},
                looked_at=names if asked.looks_only else frozenset(),
            )
            before = len(calls(root))
            answer = driver.prepare(tree, devices, context)
            edits = answer.work() if isinstance(answer, LongWork) else answer

            assert len(calls(root)) == before or not (asked.is_shared or asked.looks_only), (
                "a card was programmed under a user"
            )
            assert len(calls(root)) == before or asked.can_program
            assert devices, "the machine has a card of each maker"
            assert all(device.role is not DeviceRole.MANAGEMENT for device in devices)
            if not isinstance(edits, Refusal):
                paths = [node.path for edit in edits.values() for node in edit.device_nodes]
                assert not [path for path in paths if any(name in path for name in MANAGEMENT)]
                assert refuse_forbidden("fpga", Prepared(edits=dict(edits)), RIGHTS) is None


@pytest.mark.parametrize("path", ["/dev/dfl-fme.0", "/dev/xclmgmt15104", "/dev/xfpga/icap.m15104"])
def test_gateway_refuses_a_management_node_whoever_gives_it(path: str) -> None:
    """A driver that is wrong, or an answer that is forged, ends at the last door.

    An operator's setting alone can open it.
    """
    answer = Prepared(edits={"fpga-0": ContainerEdits(device_nodes=(DeviceNode(path=path),))})

    refusal = refuse_forbidden("fpga", answer, RIGHTS)

    assert refusal is not None
    assert refusal.reasons[0].code == "edits-forbidden"
