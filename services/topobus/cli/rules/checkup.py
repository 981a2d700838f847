"""Checks a deployment: facts in, findings out, each with a next step.

Pure. `topobus doctor` gathers the facts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Self

from msgspec import Struct

from topobus.engine.health.silence import SERVICE_SILENT
from topobus.formats.messages.device_classes import DEVICE_SERVICES
from topobus.formats.messages.messages import ApiObject, KubeletRegistrations, RuntimeConnection
from topobus.formats.messages.nouns import CLUSTER, State, from_token, to_token
from topobus.formats.messages.origin import Origin
from topobus.formats.messages.releases import release_remark
from topobus.values.device import Inventory
from topobus.values.ledger import Ledger
from topobus.values.machine import Machine, PciDevice
from topobus.values.node_text import counted, first_of
from topobus.values.request import Owner, OwnerKind

__all__ = [
    "MISSING",
    "Finding",
    "Level",
    "check_access",
    "check_certificate",
    "check_clock",
    "check_clock_here",
    "check_holders",
    "check_hub",
    "check_node",
    "check_plugin_failures",
    "check_registrations",
    "check_rejected",
    "check_releases",
    "check_rivals",
    "check_runtime",
    "check_server",
    "check_slice_fields",
    "check_stored_clock",
    "check_streams",
    "check_unread",
    "check_unserved_drivers",
    "grouped",
]

# Before 2.9 there is no direct get and no newest message per subject in consumers, which watches
# and followers need.
_OLDEST_SERVER = (2, 9, 0)
# From this version on, a hub without accounts keeps from each leaf what the others listen to
# (isolate_leafnode_interest).
_ISOLATES_LEAVES = (2, 12, 0)


# Below the first, an answer's way through a busy machine looks the same. Above the second, requests
# with short deadlines are refused as stale.
_CLOCK_AGREES_S, _CLOCK_SERVES_S = 1.0, 2.0

# Time enough for an operator who checks once a week. Services warn from then on as well
# (`topobus.bus.login.server_certificates`).
_CERTIFICATE_DAYS = 30

_SAME_TIME = "set both clocks by the same time service (chrony, ntp)"

# Last part of a field's path to the feature gate without which a server drops it.
_FEATURES = {
    "sharedCounters": "DRAPartitionableDevices",
    "consumesCounters": "DRAPartitionableDevices",
    "allowMultipleAllocations": "DRAConsumableCapacity",
    "requestPolicy": "DRAConsumableCapacity",
    "taints": "DRADeviceTaints",
    "ints": "DRAListTypeAttributes",
}
_WITHOUT = {
    "DRAPartitionableDevices": "cards are offered whole, their partitions are not",
    "DRAConsumableCapacity": "devices are held by one claim, not shared",
}

# From so many nodes on, equal findings are printed once, with the names of so many nodes.
_ALIKE = 4
_NAMED = 3

# Owners of ledgers that are objects, and the kind of these.
_STORED_AS = {OwnerKind.POD: "Pod", OwnerKind.CLAIM: "ResourceClaim"}

# A flood of garbage is one finding, not a thousand.
_SHOWN_REJECTED = 16

# PCI-SIG's base classes (pci.ids), and the vendors of such functions: a server's own display is no
# GPU, and MI300 is an accelerator and no FPGA.
_NETWORK, _DISPLAY, _ACCELERATOR = 0x02, 0x03, 0x12
_NVIDIA, _AMD, _INTEL, _XILINX, _ALTERA = 0x10DE, 0x1002, 0x8086, 0x10EE, 0x1172
_KINDS: dict[str, Callable[[PciDevice], bool]] = {
    "gpu": lambda function: (
        function.vendor in (_NVIDIA, _AMD, _INTEL) and function.class_code >> 16 in (_DISPLAY, _ACCELERATOR)
    ),
    "nic": lambda function: function.class_code >> 16 == _NETWORK,
    "fpga": lambda function: (
        function.class_code >> 16 != _NETWORK
        and (
            function.vendor in (_XILINX, _ALTERA)
            or (function.vendor, function.class_code >> 16) == (_INTEL, _ACCELERATOR)
        )
    ),
}
# A gateway's state of what is registered with kubelet.
_REGISTERED = "registered"

MISSING = "it does not exist"
"""What the bus's inspection reports of a stream that does not exist."""


class Level(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(Struct, frozen=True, kw_only=True):
    """One line of a check-up."""

    level: Level
    what: str
    """What was checked: `nats`, `stream KV_topobus_machines`, `n1: inventory gpu`."""
    found: str
    next_step: str = ""

    @classmethod
    def ok(cls, what: str, text: str) -> Self:
        """Make a finding that needs nothing."""
        return cls(level=Level.OK, what=what, found=text)

    @classmethod
    def warn(cls, what: str, text: str, next_step: str) -> Self:
        """Make a finding to look at."""
        return cls(level=Level.WARN, what=what, found=text, next_step=next_step)

    @classmethod
    def fail(cls, what: str, text: str, next_step: str) -> Self:
        """Make a finding of what does not work."""
        return cls(level=Level.FAIL, what=what, found=text, next_step=next_step)


def grouped(findings: Sequence[Finding], nodes: Iterable[str]) -> list[Finding]:
    """Merge equal findings of many nodes, and order the worst last, where a terminal ends.

    Shapes: findings — of a node as `node: what`; result — one for all nodes with the same finding,
    with their number in front. Healthy findings have different numbers on each node, so the first
    node's are shown.
    """
    node_names = frozenset(nodes)
    alike: dict[tuple[str, ...], list[tuple[str, Finding]]] = {}
    for finding in findings:
        node, _, what = finding.what.partition(": ")
        if not what or node not in node_names:
            alike[finding.level, finding.what, finding.found, finding.next_step] = [("", finding)]
            continue
        alike_texts = (
            ("", "")
            if finding.level is Level.OK
            else (_without(node, finding.found), _without(node, finding.next_step))
        )
        alike.setdefault((finding.level, f": {what}", *alike_texts), []).append((node, finding))
    shown: list[Finding] = []
    for same in alike.values():
        if len(same) < _ALIKE:
            shown += [finding for _, finding in same]
            continue
        node, first = same[0]
        of_first = f" (of {node})" if any(finding.found != first.found for _, finding in same) else ""
        what = f"{len(same)} nodes{first.what.removeprefix(node)}"
        shown.append(
            Finding(
                level=first.level,
                what=what,
                found=f"{first.found}{of_first}; on {first_of([name for name, _ in same], _NAMED)}",
                next_step=first.next_step,
            )
        )
    return sorted(shown, key=lambda finding: list(Level).index(finding.level))


def _without(node: str, text: str) -> str:
    """Replace a node's name, so that texts of many nodes can be compared.

    >>> _without("n1", "no answer for n1.gpu, but one for n10")
    'no answer for NODE.gpu, but one for n10'
    """
    return re.sub(rf"(?<![\w-]){re.escape(node)}(?![\w-])", "NODE", text)


def check_server(version: tuple[int, int, int]) -> Finding:
    """Check the server's version."""
    text = ".".join(map(str, version))
    if version < _OLDEST_SERVER:
        wanted = ".".join(map(str, _OLDEST_SERVER))
        return Finding.fail("nats", f"the server runs {text}, wanted {wanted} or later", "upgrade nats-server")
    return Finding.ok("nats", f"the server answers, version {text}")


def check_access(*, user: str, wants_login: bool, is_encrypted: bool, is_local: bool) -> Finding:
    """Check who may use the server, and whether a login to it can be overheard.

    Shapes: user — as which we are connected, empty for none; is_local — the server is at this
    machine's loopback interface.
    """
    what = "nats users"
    if not wants_login:
        # On loopback as well: every user of this machine reaches it.
        text = "the server is open: everyone who reaches it may read and write everything"
        where = "; it is reached over this machine's loopback interface here" if is_local else ""
        step = "give each process a user of its own: docs/how-to/secure-nats.md"
        return Finding.warn(what, f"{text}{where}", step)
    text = f"the server has users; this is {f'user {user}' if user else 'a login in the URL'}"
    if not is_encrypted and not is_local:
        step = "give the server a certificate, and name its authority in nats.tls_ca_file: docs/how-to/secure-nats.md"
        return Finding.warn(what, f"{text}; passwords cross the wire in clear text", step)
    return Finding.ok(what, f"{text}{'; TLS' if is_encrypted else ''}")


def check_certificate(*, issuer: str, until: str, days: int) -> Finding:
    """Check until when the server's certificate is valid: `until` for people, `days` from now."""
    what, text = "nats certificate", f"signed by {issuer}, good until {until} ({days} days)"
    if days < _CERTIFICATE_DAYS:
        step = (
            "renew it at the server: topobus keys certify FOLDER --renew, and send nats-server a SIGHUP: "
            "docs/how-to/secure-nats.md"
        )
        return Finding.warn(what, text, step)
    return Finding.ok(what, text)


def check_hub(nodes: Sequence[str], *, wants_login: bool, version: tuple[int, int, int]) -> Finding | None:
    """Check what nodes can do to each other at a hub. None for a server that is none.

    Shapes: nodes — those whose relays have recorded their progress here.
    """
    if not nodes:
        return None
    text = f"hub of {counted(len(nodes), 'node')} with servers of their own"
    if wants_login:
        return Finding.ok("hub", f"{text}, which come as its users")
    isolation = (
        ""
        if version >= _ISOLATES_LEAVES
        else f"; nats-server {version[0]}.{version[1]} also reveals to each of them what all others subscribe to"
    )
    step = (
        "give each node a user and an account of its own (topobus keys make --shape hub --node …): "
        "docs/how-to/choose-a-nats-shape.md"
    )
    return Finding.warn(
        "hub", f"{text}, and no users: each of them may write what is stored here for the others{isolation}", step
    )


def check_streams(differences: Mapping[str, str]) -> list[Finding]:
    """Check what provisioning created."""
    bad = [
        Finding.fail(f"stream {name}", trouble, _stream_step(name, trouble))
        for name, trouble in differences.items()
        if trouble
    ]
    good = len(differences) - len(bad)
    return [*([Finding.ok("streams", f"{good} of {len(differences)} streams as they should be")] if good else []), *bad]


def _stream_step(name: str, trouble: str) -> str:
    if trouble == MISSING:
        return "start topobus-controller: it makes what is missing"
    # The deployment sets the number of copies, not the catalogue. This command knows only its own
    # setting.
    copies = re.match(r"num_replicas is (\d+), wanted \d+$", trouble)
    if copies is not None:
        return (
            f"where the controllers have nats.replicas {copies[1]}, set the same here: "
            f"TOPOBUS_CLI__NATS__REPLICAS={copies[1]}; else nats stream edit {name}"
        )
    return f"repair it (nats stream edit {name}), or remove it if its content may be lost"


def check_rejected(rejected: Sequence[tuple[State[Any], str, str]]) -> list[Finding]:
    """Name the values in the buckets that cannot be read: a node runs another release, or another
    program writes in its place.

    Shapes: rejected — for each value its state, its key and what is wrong with it.
    """
    findings = [
        Finding.fail(
            f"{from_token(key.partition('.')[0])}: {state.name}" if "node" in state.parts else state.name,
            # Most reasons begin with the key.
            f"cannot read {(place := f'{state.home_of_key(key).bucket}/{key}')}: {why.removeprefix(f'{place}: ')}",
            _repair_step(state, key),
        )
        for state, key, why in rejected[:_SHOWN_REJECTED]
    ]
    if len(rejected) > _SHOWN_REJECTED:
        left_out = f"{len(rejected) - _SHOWN_REJECTED} more values that cannot be read"
        findings.append(Finding.fail("buckets", left_out, "find out what writes into these buckets"))
    return findings


def check_holders(
    ledgers: Iterable[Ledger], objects: Iterable[ApiObject], unreadable: Container[str] = ()
) -> list[Finding]:
    """Name holders whose object is not stored: an older copy of the store was restored, or only the
    object was removed.

    Where no object is stored, the objects are at an API server, and nothing can be concluded. What
    `topobus place` placed has no object.
    Shapes: unreadable — keys of objects that cannot be read, which are named elsewhere.
    """
    uids = {(stored.kind, str(stored.metadata.get("uid", ""))) for stored in objects}
    if not uids:
        return []
    lost = sorted(
        (
            str(allocation.owner),
            ledger.node,
            allocation.owner.kind,
            f"{allocation.owner.namespace}/{allocation.owner.name}",
        )
        for ledger in ledgers
        for allocation in ledger.allocations.values()
        if allocation.owner.kind in _STORED_AS
        and not _has_object(allocation.owner, uids)
        and _key_of(allocation.owner) not in unreadable
    )
    if not lost:
        return []
    shown = first_of([f"{owner} on {node}" for owner, node, _, _ in lost], _SHOWN_REJECTED)
    _, _, kind, name = lost[0]
    return [
        Finding.warn(
            "holders",
            f"{len(lost)} {'holder has' if len(lost) == 1 else 'holders have'} no object: {shown}; "
            "the store is older than they are, or their objects were removed alone",
            f"`topobus apply -f` the manifest restores it, `topobus release {kind.value} {name}` frees what "
            "it holds; `topobus holders` lists all",
        )
    ]


def check_unserved_drivers(drivers: Iterable[tuple[str, str, str]]) -> list[Finding]:
    """Name drivers that are installed beside this command, and whose class no node's service has.

    Shapes: drivers — name, class, and the step to serve that class.
    """
    return [
        Finding.warn(
            f"driver {name}",
            f"it is installed here, and no service of class {device_class} runs on any node",
            next_step,
        )
        for name, device_class, next_step in drivers
    ]


def _has_object(owner: Owner, uids: Container[tuple[str, str]]) -> bool:
    """Say whether an owner's object is stored, or need not be."""
    is_placed = owner.kind is OwnerKind.POD and owner.uid == _placed_uid(owner.namespace, owner.name)
    return is_placed or (_STORED_AS[owner.kind], owner.uid) in uids


def _key_of(owner: Owner) -> str:
    return ".".join(map(to_token, (_STORED_AS[owner.kind].lower(), owner.namespace, owner.name)))


def _placed_uid(namespace: str, name: str) -> str:
    # Imported here: Kubernetes' shapes take a while to load, and every command on the bus loads
    # this module.
    from topobus.formats.kubernetes.objects import placed_uid

    return placed_uid(namespace, name)


def check_unread(nodes: Sequence[str]) -> list[Finding]:
    """Name nodes that have inventories but no machine: a login that may write a class's inventories
    invented them, or their machines were removed.
    """
    if not nodes:
        return []
    have, were = ("has", "was") if len(nodes) == 1 else ("have", "were")
    text = (
        f"{counted(len(nodes), 'node')} {have} inventories and no machine, and {were} not looked at: "
        f"{', '.join(nodes[:_SHOWN_REJECTED])}"
    )
    step = (
        "find out who writes them, and give that login another password; then `topobus forget node "
        "--without-machine` removes them"
    )
    return [Finding.warn("inventories", text, step)]


def _repair_step(state: State[Any], key: str) -> str:
    """Return which program overwrites a value that cannot be read."""
    tokens = [from_token(token) for token in key.split(".")]
    if "node" not in state.parts and len(tokens) == len(state.parts):
        # Imported here: manifests take a while to load, and every command on the bus loads this
        # module.
        from topobus.formats.kubernetes.objects import KINDS

        kind, namespace, name = tokens
        if kind not in {known_kind.lower() for known_kind in KINDS}:
            # A typed name becomes a key in our form, which is another object's.
            bucket = state.home_of_key(key).bucket
            return (
                "no command of Topobus writes or reads this key: remove it by NATS' own tools (`nats kv del "
                f"{bucket} {key}`), then see who else writes this bucket"
            )
        where = f" -n {namespace}" if namespace != CLUSTER else ""
        return (
            f"`topobus apply -f` its manifest writes over it, `topobus delete {kind} {name}{where}` removes it; "
            "then see who else writes this bucket"
        )
    return (
        f"see the log of {'/'.join(state.writer)} on this node and its release; if it runs, see who else writes "
        "this bucket"
    )


def check_runtime(node: str, runtime: RuntimeConnection | None) -> Finding | None:
    """Check a gateway's connection to the container runtime. None when its settings disable it."""
    if runtime is None:
        return None
    what = f"{node}: container runtime"
    if runtime.why_not:
        lost = (
            "a device is given to the next owner while a container of a pod that was deleted by force still has "
            "it; claims whose devices go into the pod are refused"
        )
        step = (
            "switch NRI on in the container runtime, and mount its socket into the gateway's container; until "
            f"then {lost}{', and those with CPUs' if runtime.pins_cpus else ''}"
        )
        level = Level.FAIL if runtime.pins_cpus else Level.WARN
        return Finding(level=level, what=what, found=f"no plugin connection (NRI): {runtime.why_not}", next_step=step)
    if runtime.cpusets_unseen:
        step = (
            "mount the node's /sys/fs/cgroup read-only into the gateway's container, below its setting "
            "hardware.root (docs/how-to/exclusive-cpus.md)"
        )
        text = (
            f"claims get CPUs for themselves by {runtime.socket}, and it cannot be checked whether the kernel "
            f"keeps to it: {runtime.cpusets_unseen}"
        )
        return Finding.warn(what, text, step)
    return Finding.ok(what, f"reports containers to the gateway by {runtime.socket} (NRI)")


def check_slice_fields(node: str, dropped: Sequence[str]) -> Finding | None:
    """Check which fields of a node's ResourceSlices the API server drops.

    None when it keeps all.
    """
    if not dropped:
        return None
    features = sorted({_FEATURES.get(field.rpartition(".")[2], "") for field in dropped} - {""})
    lost = [_WITHOUT[feature] for feature in features if feature in _WITHOUT]
    text = f"the API server does not keep {', '.join(dropped)}" + (f": {'; '.join(lost)}" if lost else "")
    step = (
        f"switch {' and '.join(features)} on in kube-apiserver and kube-scheduler"
        if features
        else "upgrade the API server"
    )
    return Finding.warn(f"{node}: slices", text, step)


def check_template(node: str, differences: Sequence[str]) -> Finding:
    """Report how what a node publishes differs from what its type of machine foretold to an
    autoscaler.
    """
    if not differences:
        return Finding.ok(f"{node}: template", "its devices are those of the recorded machine")
    return Finding.warn(
        f"{node}: template",
        f"differs from the recorded machine: {first_of(differences)}",
        "record this machine (`topobus record`) and give its slices to the autoscaler, or mend the node",
    )


def check_rivals(node: str, rivals: Mapping[str, str]) -> list[Finding]:
    """Report resources that a node's gateway does not offer because a vendor's own device plugin
    does.
    """
    step = "remove that device plugin from the node, or take its vendor out of the gateway's setting profiles"
    return [
        Finding.fail(f"{node}: {resource}", f"not offered by Topobus: {why}", step)
        for resource, why in sorted(rivals.items())
    ]


def check_registrations(
    node: str, registrations: KubeletRegistrations, rivals: Mapping[str, str], *, has_devices: bool
) -> list[Finding]:
    """Check what an answering gateway reports of its registrations with kubelet.

    Shapes: rivals — resources that the gateway leaves to others, which `check_rivals` reports;
    has_devices — the node has something to offer, so kubelet must know of it.
    """
    gateway, what = f"{node}: gateway", f"{node}: kubelet"
    answers = Finding.ok(gateway, "answers")
    if not registrations.has_kubelet:
        text = f"none where the gateway looks: {registrations.folder} there has no kubelet.sock"
        step = (
            "start kubelet: the gateway registers as soon as it is there; into a gateway's container its folder "
            "must be mounted"
        )
        return [answers, Finding.warn(what, text, step)]
    plugins = {resource: status for resource, status in registrations.plugins.items() if resource not in rivals}
    if not plugins and not registrations.drivers:
        if not has_devices:
            # A class is registered when it has a device to offer.
            return [answers, Finding.ok(what, "runs; this node has no devices to offer")]
        step = "see the gateway's setting exposure, and the log of topobus-gateway"
        return [answers, Finding.fail(what, "nothing is registered, and this node has devices", step)]
    registered = sorted(
        name for name, status in (*plugins.items(), *registrations.drivers.items()) if status == _REGISTERED
    )
    # A kubelet without DRA is an ordinary one where pods can have the devices by their resource.
    driver_level = Level.WARN if plugins else Level.FAIL
    missing = [
        Finding(
            level=level,
            what=f"{node}: {name}",
            found=f"kubelet does not have it: {status}",
            next_step="see the log of topobus-gateway",
        )
        for level, kind in ((Level.FAIL, plugins), (driver_level, registrations.drivers))
        for name, status in sorted(kind.items())
        if status != _REGISTERED
    ]
    return [answers, *([Finding.ok(what, f"has {', '.join(registered)}")] if registered else []), *missing]


def check_plugin_failures(node: str, failures: Mapping[str, str]) -> list[Finding]:
    """Report device plugins of others that have registered with a node's gateway and are not
    served.
    """
    step = (
        "nothing to do when it passes, for the gateway tries it again; else see `foreign.host-failed` in the log "
        "of topobus-gateway"
    )
    return [
        Finding.fail(f"{node}: {resource}", f"its device plugin is not served: {why}", step)
        for resource, why in sorted(failures.items())
    ]


def check_clock(node: str, ahead_s: float, here_s: float | None) -> list[Finding]:
    """Check a node's clock. Empty when it agrees within a second.

    Requests are refused as stale by a node more than two seconds ahead.

    Shapes: ahead_s — of this machine's; here_s — this machine's ahead of the NATS server's, None
    when the server (before 2.10) does not report its time.
    """
    than = "this machine's" if here_s is None else "the NATS server's"
    return _clock_findings(f"{node}: clock", f"clock of {node}", ahead_s + (here_s or 0.0), than)


def check_clock_here(ahead_s: float | None) -> list[Finding]:
    """Check this machine's clock against the NATS server's.

    Empty when they agree, or when the server (before 2.10) does not report its time.
    """
    return _clock_findings("clock", "clock of this machine", ahead_s or 0.0, "the NATS server's")


def check_stored_clock(node: str, origins: Sequence[Origin]) -> list[Finding]:
    """Check the clock of a node that does not answer by its last writes.

    Empty when it agreed, or when no write has a time.
    """
    newest = max(
        (origin for origin in origins if origin.ahead_s is not None), key=lambda origin: origin.time_ns, default=None
    )
    if newest is None or not newest.clock_remark:
        return []
    return [Finding.warn(f"{node}: clock", newest.clock_remark, _SAME_TIME)]


def check_releases(node: str, releases: Mapping[str, str], own: str) -> list[Finding]:
    """Name the processes of another release than ours, those of one release in one line.

    Shapes: node — empty for what runs beside the nodes; releases — process to its release, empty
    when it is unknown.
    """
    by_release: dict[str, list[str]] = {}
    for service, release in sorted(releases.items()):
        by_release.setdefault(release, []).append(service)
    remarks = [release_remark(", ".join(services), release, own) for release, services in sorted(by_release.items())]
    what = f"{node}: releases" if node else "releases"
    step = "upgrade all to one release, in any order"
    return [Finding.warn(what, remark, step) for remark in remarks if remark]


def _clock_findings(what: str, clock_name: str, ahead_s: float, than: str) -> list[Finding]:
    if abs(ahead_s) < _CLOCK_AGREES_S:
        return []
    text = f"{clock_name} is {abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} {than}"
    return [
        Finding(
            level=Level.FAIL if ahead_s > _CLOCK_SERVES_S else Level.WARN, what=what, found=text, next_step=_SAME_TIME
        )
    ]


def check_node(
    node: str,
    machine: Machine | None,
    inventories: Sequence[Inventory],
    ledger: Ledger | None,
    silent: Mapping[str, str],
) -> Iterable[Finding]:
    """Check one node: machine, inventories and their generations, ledger, and silent services.

    Shapes: silent — service to why it did not answer, for those that did not.
    """
    yield _machine_finding(node, machine)
    by_class = {inventory.device_class: inventory for inventory in inventories}
    for device_class in sorted({*DEVICE_SERVICES, *by_class}):
        yield _inventory_finding(node, device_class, by_class.get(device_class), machine, silent)
    if ledger is None:
        step = "topobus-topology writes one as soon as it knows the machine: is it running?"
        yield Finding.fail(f"{node}: ledger", "there is none", step)
    else:
        yield Finding.ok(f"{node}: ledger", f"sequence {ledger.sequence}, {counted(len(ledger.allocations), 'owner')}")
    if "topology" in silent:
        step = (
            f"start topobus-topology on this node; if the node is gone for good: topobus forget node {node} --dry-run"
        )
        yield Finding.fail(f"{node}: topology", silent["topology"], step)
    else:
        yield Finding.ok(f"{node}: topology", "answers")


def _has_hardware(machine: Machine, device_class: str) -> bool:
    """Say whether a machine has PCI functions that a class's own service may offer.

    Every machine has CPUs.
    """
    if device_class == "cpu":
        return True
    return any(_KINDS[device_class](function) for function in machine.pci_devices)


def _machine_finding(node: str, machine: Machine | None) -> Finding:
    what = f"{node}: machine"
    if machine is None:
        step = (
            f"start topobus-discovery on this node; if there is no such node any more: topobus forget node {node} "
            "--dry-run"
        )
        return Finding.fail(what, "not reported", step)
    text = (
        f"generation {machine.generation}, {counted(len(machine.numa_nodes), 'NUMA node')}, "
        f"{counted(len(machine.online_cpus), 'CPU')}"
    )
    if machine.warnings:
        return Finding.warn(
            what, f"{text}; {counted(len(machine.warnings), 'warning')}: {machine.warnings[0]}", "see `topobus machine`"
        )
    return Finding.ok(what, text)


def _inventory_finding(
    node: str, device_class: str, inventory: Inventory | None, machine: Machine | None, silent: Mapping[str, str]
) -> Finding:
    what = f"{node}: inventory {device_class}"
    start = f"start topobus-{device_class} on this node"
    if inventory is None:
        if machine is not None and device_class in silent and not _has_hardware(machine, device_class):
            return Finding.ok(what, "no service, and no PCI function of this kind on the machine")
        if device_class in silent:
            # An operator may run a few services on purpose. A service that ran before and is silent
            # now is another case, below.
            return Finding.warn(what, "no service of this class has ever run here", start)
        return Finding.fail(what, "not published", start)
    text = f"generation {inventory.generation}, {counted(len(inventory.devices), 'device')}"
    if device_class in silent:
        text += f", unknown ({SERVICE_SILENT}: {silent[device_class]}): new pods get none, what is held stays held"
        return Finding.fail(what, text, start)
    if machine is not None and inventory.machine_generation < machine.generation:
        # No finding: a machine whose change affects no device of this class does not cause a new
        # inventory.
        text += f", unchanged since machine generation {inventory.machine_generation}"
    spares = [device.name for device in inventory.devices if device.is_spare]
    text += f", spare: {', '.join(spares)}" if spares else ""
    withheld = [device for device in inventory.devices if device.maintenance is not None]
    sick = [device.name for device in inventory.devices if not device.health.is_allocatable]
    if sick:
        return Finding.warn(what, f"{text}, not well: {', '.join(sick[:6])}", "`topobus health` shows why")
    if withheld:
        names = first_of([f"{device.name} ({device.why_not})" for device in withheld], _NAMED)
        return Finding.warn(
            what, f"{text}, withheld: {names}", "`topobus device list` lists all; `topobus device return NAME` ends it"
        )
    if inventory.warnings:
        return Finding.warn(what, f"{text}; {inventory.warnings[0]}", f"see the log of topobus-{device_class}")
    return Finding.ok(what, text)
