"""Functions of a DFL card: a claim gets the one that it asks for or a named refusal, nobody's
region is programmed under them, and a death leaves a safe card.
"""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.bitstream_files import FUNCTION, INTERFACE, OPENCL_FUNCTION, aocx, gbs, xclbin
from support.dfl_bench import DflBench, asking, claim
from support.fpga_cards import BLANK, add, port_file
from topobus.devicekit.driver import PrepareContext
from topobus.devicekit.verbs.journaled_verbs import JournaledVerbs, JournaledWork
from topobus.values.errors import HardwareError
from topobus.values.outcome import Refusal

OTHER = "0123456789abcdef" * 2


@pytest.fixture
def bench(tmp_path: Path) -> DflBench:
    """A card with one function, and a store with another one for it."""
    made = DflBench(tmp_path)
    add(made.store, gbs(), "matrix", ("team-a", "team-b"))
    return made


@pytest.mark.parametrize("function", ["matrix", FUNCTION, FUNCTION.upper()])
def test_card_is_programmed_when_it_has_another_function(bench: DflBench, function: str) -> None:
    """By the store's name or the AFU id; the container gets the port alone."""
    edits = bench.prepare(function)

    assert not isinstance(edits, Refusal), edits
    assert bench.afu_id() == FUNCTION
    assert [node.path for node in edits[bench.devices()[0].name].device_nodes] == ["/dev/dfl-port.0"]
    assert bench.programmer.calls == ["program"]


def test_card_is_not_programmed_again_when_the_next_claim_wants_the_same(bench: DflBench) -> None:
    """The function stays after its user, whose port is reset.

    Also a restart between the two changes nothing.
    """
    bench.prepare("matrix")
    bench.unprepare()
    assert bench.clean() is None
    bench.restart()

    edits = bench.prepare("matrix", claim("two", "team-b"))

    assert not isinstance(edits, Refusal), edits
    assert bench.programmer.calls == ["program", "reset"]


def test_card_is_not_touched_when_its_own_claim_is_prepared_again(bench: DflBench) -> None:
    """Kubelet prepares claims of pods that run again, also after a restart of the service."""
    first = bench.prepare("matrix")
    again = bench.prepare("matrix")
    bench.restart()

    assert bench.prepare("matrix") == again == first
    assert bench.programmer.calls == ["program"]


def test_card_is_programmed_for_its_claim_when_a_reboot_took_the_function(bench: DflBench) -> None:
    """After a loss of power the claim's pod starts again on a card with what its flash holds."""
    bench.prepare("matrix")
    port_file(bench.root, "dfl-port.0", "afu_id").write_text(BLANK, encoding="ascii")
    bench.restart()

    assert not isinstance(bench.prepare("matrix"), Refusal)
    assert (bench.afu_id(), bench.programmer.calls) == (FUNCTION, ["program", "program"])


def test_claim_without_a_function_gets_the_card_as_it_is(bench: DflBench) -> None:
    """As before there were functions."""
    assert not isinstance(bench.prepare(""), Refusal)
    assert bench.programmer.calls == []


def test_claim_gets_a_function_that_is_loaded_and_in_no_store(bench: DflBench) -> None:
    """A card that somebody has programmed by hand serves claims for it."""
    bench.can_program = False
    bench.restart()

    assert not isinstance(bench.prepare(BLANK), Refusal)


def test_selectors_see_what_is_loaded_and_what_fits(bench: DflBench) -> None:
    """Names of the store as attributes, of those alone that fit.

    A blank function is nobody's to ask for.
    """
    add(bench.store, xclbin(), "filter")
    add(bench.store, gbs(OTHER, interface=OTHER), "elsewhere")
    add(bench.store, gbs(BLANK), "blank", is_blank=True)
    before = bench.attributes()
    bench.prepare("matrix")

    seen = {name: value for name, value in bench.attributes().items() if name.startswith("fits_")}
    assert (seen, "function" in before) == ({"fits_matrix": True}, False)
    assert (bench.attributes()["function"], bench.attributes()["afuId"]) == ("matrix", FUNCTION)


def test_selectors_see_only_what_can_be_had_when_nothing_is_programmed(bench: DflBench) -> None:
    """A claim that selects by `fits_matrix` is not sent to a card that would be refused to it."""
    bench.can_program = False
    bench.restart()
    before = bench.attributes()
    port_file(bench.root, "dfl-port.0", "afu_id").write_text(FUNCTION, encoding="ascii")
    after = bench.attributes()

    assert ("fits_matrix" in before, after.get("fits_matrix"), after.get("function")) == (False, True, "matrix")


REFUSALS = {
    "unknown": ("nothing", "function-unknown"),
    "foreign namespace": ("secret", "function-forbidden"),
    "wrong interface": ("elsewhere", "function-misfit"),
    "other maker": ("filter", "function-misfit"),
    "blank": ("blank", "function-unknown"),
    "several": (OTHER, "function-ambiguous"),
    "changed": ("matrix", "bitstream-changed"),
}


@pytest.mark.parametrize(("function", "code"), REFUSALS.values(), ids=REFUSALS.keys())
def test_claim_is_refused_by_name_and_the_card_stays_as_it_is(bench: DflBench, function: str, code: str) -> None:
    """Each rule has its own code, and nothing is written to the card or left in the journal."""
    (file,) = bench.store.glob("*.gbs")
    file.write_bytes(gbs()[:-1] + b"X")
    add(bench.store, gbs(OPENCL_FUNCTION), "secret", ("team-z",))
    add(bench.store, gbs(FUNCTION, interface=OTHER), "elsewhere")
    add(bench.store, xclbin(), "filter")
    add(bench.store, gbs(BLANK), "blank", is_blank=True)
    for number in range(2):
        add(bench.store, gbs(OTHER, image=OTHER.encode() + bytes([number])), f"build{number}")

    assert bench.refusal(function)[0] == code
    assert (bench.programmer.calls, bench.afu_id(), bench.journal.entries) == ([], BLANK, {})


def test_claim_is_refused_when_nothing_is_programmed_here(bench: DflBench) -> None:
    """The setting is off: a card that has the function would do, this one has it not."""
    bench.can_program = False
    bench.restart()

    assert bench.refusal("matrix")[0] == "programming-off"
    assert not bench.driver.capabilities.cleans


@pytest.mark.parametrize("looks_only", [True, False])
def test_card_is_never_programmed_under_a_user(bench: DflBench, looks_only: bool) -> None:
    """Not for another claim, and not for an administrator who looks at
    a device that others hold.
    """
    bench.prepare("", claim("user"))

    answer = bench.prepare("matrix", claim("two"), looks_only=looks_only)

    assert isinstance(answer, Refusal)
    assert (answer.reasons[0].code, bench.afu_id(), bench.programmer.calls) == ("region-in-use", BLANK, [])


def test_claim_is_refused_when_a_process_has_the_port_open(bench: DflBench) -> None:
    """The kernel says so (EBUSY): nothing was touched, so the card is as good as before."""
    bench.programmer.is_open = True

    assert bench.refusal("matrix")[0] == "region-not-programmable"
    assert (bench.afu_id(), bench.journal.entries) == (BLANK, {})


def test_card_is_made_whole_when_programming_fails(bench: DflBench) -> None:
    """The claim is refused.

    The next start of undoing programs the region anew, and until that
    succeeds nobody gets the card.
    """
    bench.programmer.error = errno.EIO

    assert bench.refusal("matrix")[0] == "programming-failed"
    assert bench.afu_id() == "f" * 32
    assert bench.journal.entries[bench.devices()[0].name].half_done
    with pytest.raises(HardwareError, match="what is in its region is not known"):
        bench.recover()
    bench.programmer.error = 0
    bench.recover()

    assert (bench.afu_id(), bench.journal.entries) == (FUNCTION, {})


def test_card_is_blanked_when_programming_fails_and_there_is_a_blank_function(bench: DflBench) -> None:
    """Rather the operator's blank function than a tenant's."""
    add(bench.store, gbs(OTHER), "blank", is_blank=True)
    bench.programmer.error = errno.EIO
    assert bench.refusal("matrix")[0] == "programming-failed"
    bench.programmer.error = 0

    bench.recover()

    assert bench.afu_id() == OTHER


def test_card_is_blanked_after_its_user_when_there_is_a_blank_function(bench: DflBench) -> None:
    """Nothing of a tenant stays in the region; one that is blank is not written again."""
    add(bench.store, gbs(BLANK), "blank", is_blank=True)
    bench.prepare("matrix")
    bench.unprepare()

    assert bench.clean() is None
    assert (bench.afu_id(), bench.programmer.calls) == (BLANK, ["program", "reset", "program"])
    bench.prepare("", claim("two"))
    bench.unprepare(claim("two"))
    assert bench.clean() is None
    assert bench.programmer.calls == ["program", "reset", "program", "reset"]


def test_card_is_not_sick_while_it_is_programmed(bench: DflBench) -> None:
    """Its function reads as all ones then, which is a crash at any other time: nobody is evicted
    for it, and its neighbours are watched as ever.
    """
    devices = bench.devices()
    seen: list[object] = []
    bench.programmer.halfway = lambda: seen.append((bench.afu_id(), bench.driver.observe(bench.tree, devices)))
    bench.prepare("matrix")
    port_file(bench.root, "dfl-port.0", "afu_id").write_text("f" * 32, encoding="ascii")

    ((shown, observed),) = [tuple(each_look) for each_look in seen if isinstance(each_look, tuple)]
    (crashed,) = bench.driver.observe(bench.tree, devices)[devices[0].name]
    assert (shown, observed) == ("f" * 32, {devices[0].name: []})
    assert crashed.reason == "function-crashed"


def test_card_is_dirty_while_its_port_cannot_be_reset(bench: DflBench) -> None:
    """Somebody still has it open: the next owner waits, and is told why."""
    bench.prepare("matrix")
    bench.unprepare()
    bench.programmer.is_open = True

    refusal = bench.clean()

    assert refusal is not None
    assert refusal.reasons[0].code == "port-reset-failed"
    bench.programmer.is_open = False
    assert bench.clean() is None
    assert bench.journal.entries == {}


def test_opencl_containers_are_told_apart_by_what_was_programmed(bench: DflBench) -> None:
    """All of one board package show one id: only what this service, or this claim's record, knows
    is believed.
    """
    entry = add(bench.store, aocx(), "kernels")
    port_file(bench.root, "dfl-port.0", "afu_id").write_text(OPENCL_FUNCTION, encoding="ascii")

    bench.prepare("kernels")
    bench.prepare("kernels")
    bench.restart()
    bench.prepare("kernels")
    assert bench.programmer.calls == ["program"]
    bench.unprepare()
    bench.clean()
    bench.restart()
    bench.prepare(f"sha256:{entry.digest}", claim("two"))

    assert bench.programmer.calls == ["program", "reset", "program"]


def test_card_is_safe_when_the_service_dies_while_it_programs(bench: DflBench) -> None:
    """Killed with half of the image written: the next start finds the record, programs the region
    anew, and the claim can be prepared.
    """
    name = bench.devices()[0].name
    bench.journal.close()
    pid = os.fork()
    if pid == 0:
        try:
            bench.programmer.dies_midway = True
            bench.restart()
            bench.prepare("matrix")
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert bench.afu_id() == "f" * 32

    bench.recover()

    assert (bench.afu_id(), bench.journal.entries[name].half_done) == (FUNCTION, ())
    assert not isinstance(bench.prepare("matrix", claim("two")), Refusal)
    assert bench.programmer.calls == ["program"]


def test_card_stays_out_of_use_when_nobody_can_tell_what_is_in_it(bench: DflBench) -> None:
    """The file that was being loaded is gone, and there is no blank one: a person must add one, or
    program the card.
    """
    bench.programmer.error = errno.EIO
    bench.refusal("matrix")
    for path in bench.store.iterdir():
        path.unlink()
    bench.programmer.error = 0

    with pytest.raises(HardwareError, match="neither the blank function for it nor the file"):
        bench.recover()
    port_file(bench.root, "dfl-port.0", "afu_id").write_text(FUNCTION, encoding="ascii")
    bench.recover()

    assert bench.journal.entries == {}


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        ({"apiVersion": "fpga.topobus.dev/v1", "kind": "Function", "function": "matrix"}, "config[0].kind"),
        ({"apiVersion": "v1", "kind": "FunctionParameters", "function": "matrix"}, "config[0].apiVersion"),
        ({"apiVersion": "fpga.topobus.dev/v1", "kind": "FunctionParameters"}, "config[0].function"),
        ({"apiVersion": "fpga.topobus.dev/v1", "kind": "FunctionParameters", "function": 7}, "config[0].function"),
        (
            {"apiVersion": "fpga.topobus.dev/v1", "kind": "FunctionParameters", "function": "../etc"},
            "config[0].function",
        ),
        (
            {"apiVersion": "fpga.topobus.dev/v1", "kind": "FunctionParameters", "function": "matrix", "force": True},
            "config[0].force",
        ),
    ],
)
def test_configuration_is_refused_with_its_field_when_it_is_wrong(
    bench: DflBench, entry: dict[str, Any], field: str
) -> None:
    """Nothing is ignored silently."""
    context = PrepareContext(owner=claim("one"), config=(entry,))

    refusal = bench.driver.check(bench.tree, bench.devices(), context)

    assert refusal is not None
    assert [(reason.code, reason.facts["field"]) for reason in refusal.reasons] == [("function-config-invalid", field)]


def test_one_device_of_a_claim_is_asked_for_its_own_function(bench: DflBench) -> None:
    """A configuration for one request counts for its device alone, and a claim's refines its
    class's.
    """
    (device,) = bench.devices()
    config = (*asking("nothing"), *asking("matrix"))
    context = PrepareContext(owner=claim("one"), config=asking("nothing"), device_config={device.name: config})
    answer = JournaledVerbs(bench.journal, bench.driver, bench.tree).prepare([device], context, [device.name])

    assert isinstance(answer, JournaledWork), answer
    assert answer.what == f"programming {device.name} with matrix"


def test_card_without_a_region_of_its_own_is_not_programmed(bench: DflBench) -> None:
    """A virtual function has its port, and no management engine: what is loaded there is the host's
    to say.
    """
    (engine,) = bench.root.glob("sys/class/fpga_region/*/dfl-fme.0")
    engine.rename(engine.parent / "away")

    code, message = bench.refusal("matrix")

    assert (code, INTERFACE in message) == ("function-misfit", True)
    assert msgspec.json.encode(bench.journal.entries) == b"{}"
