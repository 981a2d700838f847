"""The console's page in a real browser: a sick GPU is clicked, the keyboard is enough, no width
makes it scroll sideways, and its texts can be read.
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.chromium import Browser, Page, chromium_path, open_browser, open_page
from support.running import NODE, service
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import ALIGNMENT, INVENTORY, LEDGER, MACHINE
from topobus.simulation.nats_server import NatsServer
from topobus.values.device import Device, Inventory
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.machine import Cpu, Machine, NumaNode
from topobus.values.pci import PciAddress
from topobus.values.request import Owner, OwnerKind
from topobus.values.view import NodeAlignment

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not chromium_path(), reason="no chromium is installed (apt-get install chromium)"),
]

SICK = DeviceHealth(
    state=HealthState.UNHEALTHY,
    conditions=(
        Condition(
            dimension=Dimension.PRESENCE,
            state=HealthState.UNHEALTHY,
            reason="fell-off-bus",
            message="config space reads ff",
        ),
    ),
)
TRAINER = Owner(kind=OwnerKind.POD, name="trainer", uid="u-1")
# The ratio of WCAG 2.2 (1.4.3) for every element with text of its own, against the nearest
# background that is not transparent; gives those below 4.5.
CONTRAST = """(() => {
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (color) => { const [r, g, b] = color.slice(0, 3).map((c) => { c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = (element) => { for (; element; element = element.parentElement) { const color = parts(getComputedStyle(element).backgroundColor); if (color.length === 3 || color[3] === 1) return color; } return [255, 255, 255]; };
  const bad = [];
  let looked = 0;
  for (const element of document.querySelectorAll("body *")) {
    if (![...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim()) || !element.getClientRects().length) continue;
    looked += 1;
    const [a, b] = [light(parts(getComputedStyle(element).color)), light(behind(element))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) bad.push(element.textContent);
  }
  return looked > 20 ? bad : ["only " + looked + " texts"];
})()"""  # noqa: E501


@pytest_asyncio.fixture
async def url(nats_server: NatsServer, bus: Bus) -> AsyncIterator[str]:
    """A console of a node with two sockets and four GPUs, of which a pod holds a sick one."""
    cpus = tuple(Cpu(id=cpu, online=True, core=cpu, socket=cpu // 16, numa_node=cpu // 16) for cpu in range(32))
    nodes = tuple(
        NumaNode(id=node, cpus=CpuSet(*range(16 * node, 16 * node + 16)), memory_bytes=2**38) for node in range(2)
    )
    gpus = tuple(
        Device(
            name=f"gpu-{number}",
            device_class="gpu",
            model="H100",
            numa_nodes=NodeSet(number // 2),
            pcie_root=f"pci0000:{number // 2}0",
        )
        for number in range(4)
    )
    address = PciAddress(0, 0x18, 0, 0)
    sick = Device(
        name="gpu-0",
        device_class="gpu",
        model="H100",
        numa_nodes=NodeSet(0),
        pci=address,
        pcie_root="pci0000:00",
        health=SICK,
    )
    allocation = Allocation(
        owner=TRAINER, holdings=(Holding(container="main", devices={"gpu": ("gpu-0",)}, cpus=CpuSet(0, 1, 2, 3)),)
    )
    await bus.put(MACHINE, Machine(node=NODE, numa_nodes=nodes, cpus=cpus, distances=((10, 21), (21, 10))), node=NODE)
    await bus.put(LEDGER, Ledger(node=NODE, allocations={TRAINER.key: allocation}), node=NODE)
    await bus.put(
        INVENTORY,
        Inventory(node=NODE, device_class="gpu", generation=1, devices=(sick, *gpus[1:])),
        node=NODE,
        device_class="gpu",
    )
    async with service("console", nats_server.url, {"TOPOBUS_CONSOLE__PAGE__PORT": "0"}) as running:
        yield (await running.logged("console.listening"))["url"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The browser of all tests here."""
    with open_browser() as opened:
        yield opened


@pytest_asyncio.fixture
async def page(browser: Browser) -> AsyncIterator[Page]:
    """A tab of the test's own."""
    async with open_page(browser) as opened:
        yield opened


async def _drawn(page: Page, url: str, **window: object) -> None:
    await page.show(url, **window)  # type: ignore[arg-type]  # width, height, scheme
    await page.until(
        "document.querySelectorAll('#drawing .device').length === 4 && document.querySelector('#sick-rows .row')"
    )
    if folder := os.environ.get("CONSOLE_PICTURES"):
        picture = await page.send("Page.captureScreenshot", format="png")
        file = Path(folder, f"console-{'-'.join(map(str, window.values())) or 'default'}.png")
        await asyncio.to_thread(file.write_bytes, base64.b64decode(picture["data"]))


async def test_click_on_a_sick_gpu_shows_its_pods_and_the_reason(page: Page, url: str) -> None:
    """In the node's drawing the sick GPU is a button that opens who uses it and what is wrong."""
    await _drawn(page, url)
    await page.run("document.querySelector('#drawing .device[data-key=\"gpu/gpu-0\"]').click()")
    text = await page.run("document.querySelector('#detail[open]').innerText")

    assert "fell-off-bus" in text
    assert "config space reads ff" in text
    assert "pod default/trainer" in text


async def test_class_says_what_is_free_and_opens_its_nodes(page: Page, url: str) -> None:
    """The held GPU is none of the three that are free, of which two are on one NUMA node."""
    await _drawn(page, url)
    row = await page.run("document.querySelector('#free-rows .row').innerText")
    await page.run("document.querySelector('#free-rows .row').click()")
    text = await page.run("document.querySelector('#detail[open]').innerText")

    together = "3 on a node, 2 on a NUMA node, 2 under a PCIe root"
    assert row.split("\n") == ["gpu", "3 free of 4: 1 held", f"together: {together}"]
    assert text.count(together) == 2
    assert f"{NODE}\t3 free of 4: 1 held" in text


async def test_drawing_is_that_of_the_command_line_when_a_pod_holds_a_sick_gpu(page: Page, url: str) -> None:
    """Owner's letter and health sign stand before the device, its cores carry the letter, and the
    legend says whose it is.
    """
    await _drawn(page, url)
    device = await page.run(
        "document.querySelector('#drawing .device[data-key=\"gpu/gpu-0\"]').innerText.replace(/\\s+/g, ' ')"
    )
    cores = await page.run(
        "[...document.querySelectorAll('.panel:first-child .core')].map((core) => core.textContent).join('')"
    )
    legend = await page.run("document.querySelector('.legend').innerText.replace(/\\s+/g, ' ')")

    assert device == "T!gpu-0 fell-off-bus"
    assert cores.startswith("TTTT············")
    assert legend.strip() == "Tpod default/trainer: 1 gpu, 4 cpus 0-3"


async def test_silent_service_is_shown_first_among_what_is_not_well(page: Page, url: str, bus: Bus) -> None:
    """A device service that does not answer stands before sick devices, and its row says since
    when.
    """
    word = NodeAlignment(node=NODE, unheard_classes={"nic": "2026-11-28T00:00:00.000000Z"})
    await bus.put(ALIGNMENT, word, node=NODE)
    await _drawn(page, url)
    await page.until("document.querySelectorAll('#sick-rows .row').length === 2")
    first = await page.run("document.querySelector('#sick-rows .row').innerText")

    assert f"{NODE} / nic service" in first
    assert "silent since 2026-11-28 00:00:00 UTC" in first


async def test_keyboard_alone_opens_and_closes_a_device(page: Page, url: str) -> None:
    """Tab reaches the drawing with a focus that is seen, arrows move in it, Enter opens a device,
    Escape closes it and gives the focus back.
    """
    await _drawn(page, url)
    for _ in range(5):
        # The link to the drawing, what is not well, the list of nodes, what is free, the drawing.
        await page.key("Tab")
    first = await page.run(
        "[document.activeElement.dataset.key, getComputedStyle(document.activeElement).outlineStyle]"
    )
    await page.key("ArrowDown")
    second = await page.run("document.activeElement.dataset.key")
    await page.key("Enter")
    await page.until("document.querySelector('#detail').open")
    label = await page.run("document.querySelector('#detail-title').textContent")
    await page.key("Escape")
    await page.until("!document.querySelector('#detail').open")
    after = await page.run("document.activeElement.dataset.key")

    assert first == ["gpu/gpu-0", "solid"]
    assert (second, label, after) == ("gpu/gpu-1", f"gpu-1 of {NODE}", "gpu/gpu-1")


@pytest.mark.parametrize(
    ("width", "height", "scheme"),
    [(400, 800, "light"), (1440, 900, "light"), (1440, 900, "dark"), (3840, 2160, "dark")],
)
async def test_page_fits_and_can_be_read_when_the_window_has_another_size_or_theme(
    page: Page, url: str, width: int, height: int, scheme: str
) -> None:
    """No width scrolls sideways, and each text has a contrast of 4.5:1 or more in both themes."""
    await _drawn(page, url, width=width, height=height, scheme=scheme)
    wide = await page.run("document.documentElement.scrollWidth")
    unreadable = await page.run(CONTRAST)

    assert wide <= width
    assert unreadable == []


async def test_node_has_an_address_that_can_be_opened_and_gone_back_to(page: Page, url: str, bus: Bus) -> None:
    """A click on a node changes the page's address.

    The address opens that node, and the browser's way back the one before.
    """
    inventory = Inventory(
        node="n2", device_class="gpu", generation=1, devices=(Device(name="gpu-7", device_class="gpu"),)
    )
    await bus.put(
        MACHINE, Machine(node="n2", numa_nodes=(NumaNode(id=0, cpus=CpuSet(), memory_bytes=1),), cpus=()), node="n2"
    )
    await bus.put(INVENTORY, inventory, node="n2", device_class="gpu")
    await _drawn(page, url)
    before = await page.run("[...document.querySelectorAll('#nodes .row')].map((row) => row.dataset.key)")
    await page.until("document.querySelectorAll('#nodes .row').length === 2")
    await page.run("document.querySelector('#nodes .row[data-key=n2]').click()")
    await page.until("document.querySelector('#drawing .device[data-key=\"gpu/gpu-7\"]')")
    address = await page.run("location.href")
    await page.run("history.back()")
    await page.until("document.querySelector('#drawing .device[data-key=\"gpu/gpu-0\"]')")
    await page.show("about:blank")
    await page.show(address)
    await page.until("document.querySelector('#drawing .device[data-key=\"gpu/gpu-7\"]')")

    assert before[0] == NODE
    assert address == f"{url}#/nodes/n2"


async def test_owner_of_the_legend_says_what_it_has(page: Page, url: str) -> None:
    """A click on it names the devices, the sick one with its reason."""
    await _drawn(page, url)
    await page.run("document.querySelector('.owner').click()")
    text = await page.run("document.querySelector('#detail[open]').innerText")

    assert "pod default/trainer on" in text
    assert "gpu-0, H100: unhealthy, fell-off-bus" in text


async def test_owners_have_other_colours_when_their_letters_differ(page: Page, url: str, bus: Bus) -> None:
    """Twelve owners of one node are twelve colours, as long as their
    letters are not twelve apart.
    """
    owners = [Owner(kind=OwnerKind.POD, name=name, uid=name) for name in "abcdefghijkl"]
    ledger = Ledger(
        node=NODE,
        sequence=9,
        allocations={owner.key: Allocation(owner=owner, holdings=(Holding(),)) for owner in owners},
    )
    await bus.put(LEDGER, ledger, node=NODE)
    await _drawn(page, url)
    await page.until("document.querySelectorAll('.owner').length === 12")
    colours = await page.run(
        "[...document.querySelectorAll('.owner .sign')].map((sign) => getComputedStyle(sign).backgroundColor)"
    )

    assert len(set(colours)) == 12


@pytest.mark.parametrize("width", [400, 1440])
async def test_what_is_not_well_stands_first_and_dialogs_are_one(page: Page, url: str, bus: Bus, width: int) -> None:
    """At any width above fleet and drawing.

    What the list opens has model, address and NUMA node, and says its reason once.
    """
    await _drawn(page, url, width=width, height=800)
    tops = await page.run("['sick', 'fleet'].map((id) => document.getElementById(id).getBoundingClientRect().top)")
    wide = await page.run("document.querySelector('#decisions').getBoundingClientRect().width")
    await page.run("document.querySelector('#sick-rows .row').click()")
    from_list = await page.run("document.querySelector('#detail').innerText")
    await page.run("document.querySelector('#detail').close()")
    await page.run("document.querySelector('#drawing .device[data-key=\"gpu/gpu-0\"]').click()")
    from_drawing = await page.run("document.querySelector('#detail').innerText")

    assert tops == sorted(tops)
    assert wide > 300
    for text in (from_list, from_drawing):
        assert [word for word in ("H100", "0000:18:00.0", "NUMA node", "pod default/trainer") if word not in text] == []
        assert text.count("config space reads ff") == 1


async def test_nodes_are_searched_and_sick_ones_first_when_there_are_many(page: Page, url: str, bus: Bus) -> None:
    """Beyond some nodes there is a field that finds names, classes and states.

    The sick node stands first.
    """
    for number in range(12):
        inventory = Inventory(
            node=f"a{number}", device_class="nic", generation=1, devices=(Device(name="nic-0", device_class="nic"),)
        )
        await bus.put(INVENTORY, inventory, node=f"a{number}", device_class="nic")
    names = "[...document.querySelectorAll('#nodes .row')].map((row) => row.dataset.key)"
    await _drawn(page, url)
    await page.until("document.querySelectorAll('#nodes .row').length === 13")
    all_names = await page.run(names)
    await page.run(
        "document.querySelector('#filter').value = 'a1 nic'; "
        "document.querySelector('#filter').dispatchEvent(new Event('input'))"
    )
    filtered = await page.run(names)
    await page.run(
        "document.querySelector('#filter').value = 'sick'; "
        "document.querySelector('#filter').dispatchEvent(new Event('input'))"
    )
    sick = await page.run(names)

    assert all_names == [NODE, *(f"a{number}" for number in range(12))]
    assert filtered == ["a1", "a10", "a11"]
    assert sick == [NODE]


async def test_wrong_password_is_told_where_it_is_typed(
    nats_server: NatsServer, bus: Bus, page: Page, tmp_path: Path
) -> None:
    """The form says so after a wrong one and not before; the right one leads to the page."""
    password = tmp_path / "password"
    password.write_text("correct-horse-battery")
    settings = {"TOPOBUS_CONSOLE__PAGE__PORT": "0", "TOPOBUS_CONSOLE__PAGE__PASSWORD_FILE": str(password)}
    shown = "getComputedStyle(document.querySelector('#wrong')).display"
    type_in = "document.querySelector('#password').value = '{}'; document.querySelector('form').requestSubmit()"
    async with service("console", nats_server.url, settings) as running:
        url = (await running.logged("console.listening"))["url"]
        await page.show(f"{url}login")
        await page.until("document.readyState === 'complete' && document.querySelector('#wrong')")
        before = await page.run(shown)
        await page.run(type_in.format("wrong"))
        await page.until(
            "location.hash === '#wrong' && document.readyState === 'complete' && document.querySelector('#wrong')"
        )
        after = await page.run(shown)
        await page.run(type_in.format("correct-horse-battery"))
        await page.until("location.pathname === '/'")

    assert (before, after) == ("none", "block")
