"""Shares of devices over random histories, through both doors: never whole and shared at once,
never more than there is, no replica twice.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from support.laws import examples
from topobus.devicekit.sharing.shared_devices import SharedPool, with_sharing
from topobus.engine.ledger import transitions
from topobus.engine.ledger.adoption_faults import fault_of_adoption, shares_of
from topobus.engine.ledger.ledger_invariant import check_holders
from topobus.formats.messages.messages import AdoptRequest
from topobus.values.device import Device
from topobus.values.device_sharing import HeldShare
from topobus.values.idset import NodeSet
from topobus.values.ledger import Adoption, Ledger
from topobus.values.outcome import Refusal
from topobus.values.pools import Condition
from topobus.values.request import Owner, OwnerKind
from topobus.values.shares import free_replicas, replica_share, shares_held
from topobus.values.view import NodeView

GIB = 1 << 30
REPLICAS = 4
POOL = SharedPool(name="gpu-shared", where=(Condition(field="driver", equals="nvidia"),), replicas=REPLICAS)
DEVICES = tuple(
    Device(name=f"gpu-{index}", device_class="gpu", driver="nvidia", pool="gpu-shared", capacity={"memory": 80 * GIB})
    for index in range(2)
)
SHARED = with_sharing(DEVICES, (POOL,))
NAMES = st.sampled_from([device.name for device in DEVICES])
OWNERS = st.sampled_from(["a", "b", "c", "d", "e"])
RESOURCES = st.sampled_from(["topobus.dev/gpu-shared", "topobus.dev/gpu"])


class Shares(RuleBasedStateMachine):
    """One node with two GPUs, whose operator shares them, stops sharing them, and shares them
    again.
    """

    @initialize()
    def start(self) -> None:
        """Nothing is held."""
        self.ledger = Ledger(node="n1")
        self.devices = SHARED
        self.count = 0

    @property
    def view(self) -> NodeView:
        """The node with nothing held, as topology judges adoptions."""
        return NodeView(node="n1", numa_nodes=NodeSet(0), devices={"gpu": self.devices})

    def adopt(
        self, owner: Owner, devices: tuple[str, ...], shared: tuple[str, ...], shares: dict[str, HeldShare]
    ) -> Refusal | None:
        """Adopt as topology does; the refusal, if it is one."""
        self.count += 1
        asked = AdoptRequest(
            op_id=f"op-{self.count}",
            owner=owner,
            devices={"gpu": devices},
            shared={"gpu": shared},
            shares={"gpu": shares},
        )
        fault = fault_of_adoption(self.view, self.ledger, asked)
        if fault is not None:
            return fault
        step = transitions.adopt(
            self.ledger,
            Adoption(owner=owner, devices=asked.devices, shared=shares_of(self.view, asked), shares=asked.shares),
            op_id=asked.op_id,
            decision_id=asked.op_id,
        )
        if isinstance(step, Refusal):
            return step
        self.ledger = step.ledger
        return None

    @rule(name=NAMES, numbers=st.sets(st.integers(0, REPLICAS - 1), min_size=1, max_size=2))
    def replicas(self, name: str, numbers: set[int]) -> None:
        """Kubelet gives replicas to a container."""
        device = next(device for device in SHARED if device.name == name)
        uid = f"{name}-{'-'.join(map(str, sorted(numbers)))}"
        owner = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name="topobus.dev/gpu-shared", uid=uid)
        self.adopt(owner, (name,), (name,), {name: replica_share(device, numbers)})

    @rule(owner=OWNERS, name=NAMES, memory=st.integers(1, 90), shares=st.integers(1, REPLICAS))
    def claim_share(self, owner: str, name: str, memory: int, shares: int) -> None:
        """A claim with a share is prepared.

        What does not fit is refused with numbers that add up.
        """
        amounts = {"memory": memory * GIB, "shares": shares}
        key = Owner(kind=OwnerKind.CLAIM, name=owner, uid=owner)
        refusal = self.adopt(key, (name,), (name,), {name: HeldShare(amounts=amounts)})
        for reason in refusal.reasons if refusal is not None else ():
            if reason.code == "capacity-short":
                assert int(str(reason.facts["wanted"])) > int(str(reason.facts["left"]))

    @rule(owner=OWNERS, name=NAMES)
    def claim_whole(self, owner: str, name: str) -> None:
        """A claim with the whole device is prepared."""
        self.adopt(Owner(kind=OwnerKind.CLAIM, name=owner, uid=owner), (name,), (), {})

    @rule(name=NAMES, resource=RESOURCES)
    def plugin_whole(self, name: str, resource: str) -> None:
        """Kubelet gives the whole device, as it does while it is not shared."""
        self.adopt(
            Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name=resource, uid=f"whole-{name}"),
            (name,),
            (),
            {},
        )

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """An owner goes."""
        if self.ledger.allocations:
            key = data.draw(st.sampled_from(sorted(self.ledger.allocations)))
            self.count += 1
            step = transitions.release(
                self.ledger, op_id=f"op-{self.count}", owner=self.ledger.allocations[key].owner, decision_id="r"
            )
            assert not isinstance(step, Refusal)
            self.ledger = step.ledger

    @rule()
    def operator_changes_mind(self) -> None:
        """The setting goes, or comes back."""
        self.devices = DEVICES if self.devices is SHARED else SHARED

    @invariant()
    def nothing_is_whole_and_shared(self) -> None:
        """Of each device either one owner has the whole, or all have shares of it that fit into it,
        and each replica once.
        """
        check_holders(self.ledger)
        holdings = [
            (key, holding) for key, allocation in self.ledger.allocations.items() for holding in allocation.holdings
        ]
        for device in SHARED:
            by_share = [key for key, holding in holdings if device.name in holding.shared.get("gpu", ())]
            holders = [key for key, holding in holdings if device.name in holding.devices.get("gpu", ())]
            assert len(holders) <= 1 or holders == by_share
            held = shares_held(holdings).get("gpu", {}).get(device.name, {})
            for capacity, total in device.capacity.items():
                assert sum(share.amounts.get(capacity, 0) for share in held.values()) <= total
            assert (
                len([number for share in held.values() for number in share.replicas]) + free_replicas(device, held)
                <= REPLICAS
            )
            # What is told of a share is told of what is held by share.
            assert set(held) <= set(by_share)


Shares.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=25, deadline=None)
TestShares = Shares.TestCase
