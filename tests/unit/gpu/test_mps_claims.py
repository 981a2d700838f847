"""Which MPS daemon an owner of GPUs gets, with which limits, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from topobus.devicekit.driver import PrepareContext
from topobus.formats.kubernetes.classic.classic_parameters import MPS, MpsConfig, Sharing
from topobus.formats.messages.messages import Prepared
from topobus.gateway.containers.rules.edit_limits import NO_RIGHTS, refuse_forbidden, rights_of
from topobus.gpu.config import MpsSettings
from topobus.gpu.mps.claims import MpsPlan, MpsSharing, client_limits
from topobus.gpu.mps.daemon_state import Limits
from topobus.gpu.mps.daemons import MpsDaemons
from topobus.sysfs.driver_files import DriverFilesSettings
from topobus.values.device import Device
from topobus.values.device_sharing import DeviceSharing
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

_OWNER = Owner(kind=OwnerKind.CLAIM, name="c", uid="u")
_PROGRAMS = ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "nvidia-smi")
_GIB = 1 << 30


def _gpu(name: str, **fields: Any) -> Device:
    return Device(
        **{
            "name": name,
            "device_class": "gpu",
            "driver": "nvidia",
            "uuid": f"GPU-{name}",
            "capacity": {"shares": 4},
            **fields,
        }
    )


def _root(folder: Path, *programs: str) -> DriverFilesSettings:
    (folder / "usr" / "bin").mkdir(parents=True)
    for name in programs:
        (folder / "usr" / "bin" / name).touch(mode=0o755)
    return DriverFilesSettings(root=str(folder))


def _plan(
    settings: DriverFilesSettings,
    *devices: Device,
    shares: dict[str, dict[str, int]] | None = None,
    partitions: tuple[str, ...] = (),
    **mps: Any,
) -> MpsPlan | Refusal | None:
    sharing = MpsSharing(MpsDaemons(MpsSettings(owned=True, **mps)))
    context = PrepareContext(owner=_OWNER, shares=shares or {})
    return sharing.plan(devices, context, Sharing(strategy=MPS), settings, version="", partitions=partitions)


@pytest.mark.parametrize(
    ("config", "share", "limits"),
    [
        pytest.param(None, {}, Limits(memory_mib=(0,)), id="nothing-said"),
        pytest.param(
            MpsConfig(default_active_thread_percentage=30),
            {},
            Limits(threads_percent=30, memory_mib=(0,)),
            id="the-claims-threads",
        ),
        pytest.param(
            MpsConfig(default_pinned_device_memory_limit="1500k"), {}, Limits(memory_mib=(1,)), id="rounded-down"
        ),
        pytest.param(
            MpsConfig(default_pinned_device_memory_limit="1k"),
            {},
            Limits(memory_mib=(1,)),
            id="never-nothing-which-means-all",
        ),
        pytest.param(
            None, {"memory": 20 * _GIB, "shares": 1}, Limits(threads_percent=25, memory_mib=(20480,)), id="a-share"
        ),
        pytest.param(
            MpsConfig(default_active_thread_percentage=90, default_pinned_device_memory_limit="60Gi"),
            {"memory": 20 * _GIB, "shares": 2},
            Limits(threads_percent=50, memory_mib=(20480,)),
            id="no-more-than-the-share",
        ),
        pytest.param(
            MpsConfig(default_active_thread_percentage=10, default_pinned_device_memory_limit="1Gi"),
            {"memory": 20 * _GIB, "shares": 2},
            Limits(threads_percent=10, memory_mib=(1024,)),
            id="less-than-the-share",
        ),
    ],
)
def test_client_has_the_smaller_of_claim_and_share(
    config: MpsConfig | None, share: dict[str, int], limits: Limits
) -> None:
    """A claim may ask for less than its part, and never gets more."""
    context = PrepareContext(owner=_OWNER, shares={"gpu-0": share} if share else {})

    assert client_limits(Sharing(strategy=MPS, mps_config=config), [_gpu("gpu-0")], context) == limits


def test_daemon_is_the_owners_for_whole_gpus_and_everybodys_for_a_part(tmp_path: Path) -> None:
    """A daemon of whole GPUs is named by the first and has its owner.

    That of a part has none, for others join it.
    """
    settings = _root(tmp_path, *_PROGRAMS)
    whole = _plan(settings, _gpu("gpu-1"), _gpu("gpu-0"))
    part = _plan(settings, _gpu("gpu-1"), shares={"gpu-1": {"shares": 1}})
    replica = _plan(settings, _gpu("gpu-1", sharing=DeviceSharing(replicas=4)))

    assert isinstance(whole, MpsPlan)
    assert isinstance(part, MpsPlan)
    assert isinstance(replica, MpsPlan)
    assert (whole.daemon.name, whole.daemon.owner, [gpu.uuid for gpu in whole.daemon.gpus]) == (
        "gpu-0",
        _OWNER.key,
        ["GPU-gpu-0", "GPU-gpu-1"],
    )
    assert [(plan.daemon.name, plan.daemon.owner) for plan in (part, replica)] == [("gpu-1", ""), ("gpu-1", "")]


@pytest.mark.parametrize(
    ("devices", "arguments", "code", "says"),
    [
        pytest.param(
            ("gpu-0", "gpu-1"),
            {"shares": {"gpu-0": {"shares": 1}}},
            "mps-several-daemons",
            "gpu-0, gpu-1",
            id="a-part-beside-another",
        ),
        pytest.param(("mig-0",), {"partitions": ("mig-0",)}, "mps-partition", "mig-0", id="an-instance"),
    ],
)
def test_plan_is_refused_when_no_one_daemon_can_serve(
    tmp_path: Path, devices: tuple[str, ...], arguments: dict[str, Any], code: str, says: str
) -> None:
    """The refusal names the devices."""
    refused = _plan(_root(tmp_path, *_PROGRAMS), *map(_gpu, devices), **arguments)

    assert isinstance(refused, Refusal)
    assert refused.reasons[0].code == code
    assert says in refused.reasons[0].message


def test_plan_is_refused_when_a_uuid_is_not_known(tmp_path: Path) -> None:
    """A daemon is told its GPUs by UUID."""
    refused = _plan(_root(tmp_path, *_PROGRAMS), _gpu("gpu-0"), _gpu("gpu-1", uuid=""))

    assert isinstance(refused, Refusal)
    assert refused.reasons[0].code == "mps-uuid-unknown"
    assert "gpu-1" in refused.reasons[0].message


@pytest.mark.parametrize(
    ("programs", "exclusive", "missing"),
    [
        pytest.param(_PROGRAMS[:1], True, ("nvidia-cuda-mps-server", "nvidia-smi"), id="server-and-smi"),
        pytest.param(_PROGRAMS[:2], True, ("nvidia-smi",), id="smi-for-the-compute-mode"),
        pytest.param(_PROGRAMS[:2], False, (), id="no-smi-where-the-mode-is-left-alone"),
    ],
)
def test_plan_names_the_programs_that_the_driver_root_lacks(
    tmp_path: Path, programs: tuple[str, ...], exclusive: bool, missing: tuple[str, ...]
) -> None:
    """nvidia-smi is needed only where compute modes are set."""
    answer = _plan(_root(tmp_path, *programs), _gpu("gpu-0"), exclusive_process=exclusive)

    if missing:
        assert isinstance(answer, Refusal)
        assert answer.reasons[0].code == "mps-program-missing"
        assert answer.reasons[0].facts["missing"] == missing
    else:
        assert isinstance(answer, MpsPlan)


@pytest.mark.parametrize("shared_memory", ["/dev/shm", "/run/topobus/mps-shm"])
def test_clients_edits_pass_the_gateway_as_shipped(tmp_path: Path, shared_memory: str) -> None:
    """With the usual folders, and with those of the overlay, nobody has to allow anything."""
    plan = _plan(_root(tmp_path, *_PROGRAMS), _gpu("gpu-0"), shared_memory=shared_memory)

    assert isinstance(plan, MpsPlan)
    answer = Prepared(edits={}, common=plan.edits)
    assert refuse_forbidden("gpu", answer, rights_of("gpu", NO_RIGHTS, is_foreign=False)) is None


def test_program_of_another_root_gets_the_drivers_libraries_alone(tmp_path: Path) -> None:
    """Without a complete driver there are none to link, and nothing else of that root's folders is
    on the loader's path.
    """
    plan = _plan(_root(tmp_path, *_PROGRAMS), _gpu("gpu-0"))

    assert isinstance(plan, MpsPlan)
    assert plan.daemon.programs.control == str(tmp_path / "usr" / "bin" / "nvidia-cuda-mps-control")
    assert plan.daemon.programs.libraries == {}
