"""The simulated SR-IOV card of tests: it obeys the number that is
written, and nothing that is not.
"""

from __future__ import annotations

import threading
from pathlib import Path

from support.kernel_writes import KernelWrites
from support.sriov_kernel import PHYSICAL, SriovKernel

LIMIT_S = 60.0


def test_number_that_is_being_written_is_not_obeyed_before_it_is_there(tmp_path: Path) -> None:
    """A kernel that is late looks at the first of two writes while the second has emptied the file:
    it obeys what that one then says.
    """
    kernel = SriovKernel(tmp_path)
    number = tmp_path / f"sys/bus/pci/devices/{PHYSICAL}/sriov_numvfs"
    (tmp_path / "sys/hold").mkdir()
    held, go_on = threading.Event(), threading.Event()

    def hold(_: str) -> None:
        held.set()
        assert go_on.wait(LIMIT_S)

    with KernelWrites(tmp_path) as writes:
        writes.obey("sys/hold/file", hold)
        kernel.follow(writes)
        (tmp_path / "sys/hold/file").write_text("x")
        assert held.wait(LIMIT_S)
        number.write_text("2")
        with number.open("w") as second:
            go_on.set()
            writes.settle()
            before = list(kernel.writes)
            second.write("3")

    assert before == []
    assert kernel.writes == [3]
