"""Which devices are in which pool, and which pools an operator cannot have."""

from __future__ import annotations

from pathlib import Path

import pytest

from topobus.gpu.config import GpuSettings
from topobus.process.config import load_settings
from topobus.values.device import AttributeValue, Device
from topobus.values.errors import ConfigError
from topobus.values.idset import NodeSet
from topobus.values.pci import PciAddress
from topobus.values.pools import Condition, Pool, fault_of_pools, pool_of

GIB = 1 << 30
H100 = Device(
    name="gpu-0",
    device_class="gpu",
    driver="nvidia",
    model="NVIDIA H100 80GB HBM3",
    numa_nodes=NodeSet(1),
    pci=PciAddress.parse("0000:3b:00.0"),
    attributes={"mig": False, "lanes": 16, "partition": "1"},
    capacity={"memory": 80 * GIB},
)


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        pytest.param(Condition(field="model", glob="*H100*"), True, id="glob"),
        pytest.param(Condition(field="model", glob="*h100*"), False, id="glob-minds-capitals"),
        pytest.param(Condition(field="model", glob="H100"), False, id="glob-is-of-the-whole"),
        pytest.param(Condition(field="driver", equals="nvidia"), True, id="text"),
        pytest.param(Condition(field="driver", one_of=("amd", "nvidia")), True, id="one-of"),
        pytest.param(Condition(field="driver", one_of=("amd",)), False, id="none-of"),
        pytest.param(Condition(field="pci", glob="0000:3b:*"), True, id="address"),
        pytest.param(Condition(field="numa_node", equals=1), True, id="numa-node"),
        pytest.param(Condition(field="numa_node", maximum=0), False, id="other-node"),
        pytest.param(Condition(field="socket", minimum=0), False, id="unknown-number"),
        pytest.param(Condition(field="uuid", glob="*"), False, id="unknown-text"),
        pytest.param(Condition(field="capacity.memory", minimum="80Gi"), True, id="quantity-at-least"),
        pytest.param(Condition(field="capacity.memory", minimum="40Gi", maximum="80Gi"), True, id="quantity-between"),
        pytest.param(Condition(field="capacity.memory", minimum="81Gi"), False, id="quantity-too-little"),
        pytest.param(Condition(field="capacity.cores", minimum=0), False, id="unknown-capacity"),
        pytest.param(Condition(field="attributes.mig", equals=False), True, id="boolean"),
        pytest.param(Condition(field="attributes.mig", equals=0), False, id="false-is-not-zero"),
        pytest.param(Condition(field="attributes.lanes", equals=16), True, id="number"),
        pytest.param(Condition(field="attributes.partition", equals=1), False, id="text-is-no-number"),
        pytest.param(Condition(field="attributes.mig", minimum=0), False, id="boolean-has-no-size"),
        pytest.param(Condition(field="attributes.lanes", glob="*"), False, id="number-has-no-letters"),
        pytest.param(Condition(field="attributes.colour", equals="red"), False, id="unknown-attribute"),
    ],
)
def test_condition_holds_only_of_what_the_device_says(condition: Condition, holds: bool) -> None:
    """Each test means what it says, of the value's own type.

    What a device does not tell is never true of it.
    """
    assert condition.holds(H100) is holds


def test_device_is_in_the_first_pool_that_takes_it_when_several_would() -> None:
    """One device is in one resource: the operator's order decides, and all conditions of a pool
    must hold.
    """
    narrow = Pool(
        name="gpu-h100", where=(Condition(field="model", glob="*H100*"), Condition(field="numa_node", equals=1))
    )
    wide = Pool(name="gpu-nvidia", where=(Condition(field="driver", equals="nvidia"),))
    elsewhere = Pool(
        name="gpu-left", where=(Condition(field="driver", equals="nvidia"), Condition(field="numa_node", equals=0))
    )

    assert (
        pool_of(H100, (elsewhere, narrow, wide)),
        pool_of(H100, (wide, narrow)),
        pool_of(H100, (elsewhere,)),
        pool_of(H100, ()),
    ) == (
        "gpu-h100",
        "gpu-nvidia",
        "",
        "",
    )


def refused(tmp_path: Path, text: str) -> str:
    """Load settings that must be refused: the sentence."""
    file = tmp_path / "gpu.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as exception_info:
        load_settings(GpuSettings, "gpu", file=file, environ={"TOPOBUS_ALL__NODE": "n"})
    assert str(file) in str(exception_info.value)
    return str(exception_info.value)


@pytest.mark.parametrize(
    ("condition", "part"),
    [
        pytest.param('field = "modle", glob = "*"', "did you mean model?", id="field-typo"),
        pytest.param('field = "colour", glob = "*"', "there are driver, model", id="field-unknown"),
        pytest.param('field = "attribute.colour", equals = 1', "did you mean attributes.colour?", id="table-typo"),
        pytest.param(
            'field = "attributes.", equals = 1', "there is no field 'attributes.'", id="attribute-without-name"
        ),
        pytest.param(
            'field = "model"', "wanted one of equals, one_of, glob, minimum or maximum; got none", id="no-test"
        ),
        pytest.param('field = "model", equals = "a", glob = "b"', "got equals and glob", id="two-tests"),
        pytest.param('field = "model", minimum = 3', "field 'model' is text", id="size-of-text"),
        pytest.param('field = "model", one_of = ["a", 1]', "field 'model' is text", id="number-for-text"),
        pytest.param('field = "numa_node", equals = "0"', "field 'numa_node' is a number", id="text-for-number"),
        pytest.param(
            'field = "capacity.memory", glob = "8*"', "field 'capacity.memory' is a number", id="glob-for-number"
        ),
        pytest.param(
            'field = "capacity.memory", minimum = "80 GB"', "minimum is not a quantity: '80 GB'", id="no-quantity"
        ),
        pytest.param(
            'field = "capacity.memory", minimum = 9, maximum = 8',
            "no number is at least 9 and at most 8",
            id="empty-range",
        ),
        pytest.param('field = "model", like = "x"', "there is no setting", id="unknown-key"),
        pytest.param('field = "model", glob = 3', "Expected `str`", id="wrong-type"),
    ],
)
def test_settings_refuse_a_condition_that_cannot_mean_what_was_meant(tmp_path: Path, condition: str, part: str) -> None:
    """A typo must not make an empty pool: the error names what is wrong, what would be right, and
    the file.
    """
    assert part in refused(tmp_path, f'[[pools]]\nname = "gpu-h100"\nwhere = [{{ {condition} }}]\n')


@pytest.mark.parametrize(
    ("text", "part"),
    [
        pytest.param('[[pools]]\nname = "GPU_H100"\nwhere = []', "wanted lower-case letters", id="name"),
        pytest.param('[[pools]]\nname = "gpu-h100"\nwhere = []', "where is empty", id="everything"),
        pytest.param('[[pools]]\nname = "gpu-h100"', "missing required field `where`", id="no-conditions"),
    ],
)
def test_settings_refuse_a_pool_that_is_none(tmp_path: Path, text: str, part: str) -> None:
    """A pool has a name that a resource can have, and says what is in it."""
    assert part in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("device_class", "names", "part"),
    [
        pytest.param("gpu", ["gpu-a", "gpu-b"], "", id="fine"),
        pytest.param("gpu", ["gpu-a", "gpu-a"], "listed twice", id="twice"),
        pytest.param("gpu", ["h100"], "such as gpu-h100", id="without-class"),
        pytest.param("gpu", ["gpu"], "begins with 'gpu-'", id="the-class-itself"),
        pytest.param("nic", ["gpu-a"], "begins with 'nic-'", id="another-class"),
        pytest.param("cpu", ["cpu-a"], "class cpu has no pools", id="cpus"),
    ],
)
def test_pools_are_refused_when_they_cannot_stand_beside_each_other(
    device_class: str, names: list[str], part: str
) -> None:
    """Names tell the class and come once; exclusive CPUs are kubelet's own resource."""
    fault = fault_of_pools(
        device_class, [Pool(name=name, where=(Condition(field="model", glob="*"),)) for name in names]
    )

    assert part in fault
    assert bool(fault) is bool(part)


@pytest.mark.parametrize("value", ["text", 7, True])
def test_settings_keep_the_type_of_a_value_when_they_are_read(tmp_path: Path, value: AttributeValue) -> None:
    """TOML knows text, numbers and booleans apart, and so does a condition."""
    written = f'"{value}"' if isinstance(value, str) else str(value).lower()
    file = tmp_path / "gpu.toml"
    file.write_text(f'[[pools]]\nname = "gpu-x"\nwhere = [{{ field = "attributes.a", equals = {written} }}]\n')
    (pool,) = load_settings(GpuSettings, "gpu", file=file, environ={"TOPOBUS_ALL__NODE": "n"}).pools

    assert (pool.where[0].equals, type(pool.where[0].equals)) == (value, type(value))


def test_settings_take_pools_from_the_environment_when_they_are_json() -> None:
    """What a container is configured with can say the same."""
    text = '[{"name": "gpu-h100", "where": [{"field": "capacity.memory", "minimum": "80Gi"}]}]'
    (pool,) = load_settings(
        GpuSettings, "gpu", file=None, environ={"TOPOBUS_ALL__NODE": "n", "TOPOBUS_GPU__POOLS": text}
    ).pools

    assert pool.takes(H100)


def test_reference_page_shows_pools_that_can_be_had(tmp_path: Path) -> None:
    """What an operator copies from the page is taken, in TOML and as JSON in the environment."""
    page = (Path(__file__).parents[3] / "docs/reference/pools.md").read_text()
    file = tmp_path / "gpu.toml"
    file.write_text(page.partition("```toml\n")[2].partition("```")[0])
    variable = page.partition("`TOPOBUS_GPU__POOLS='")[2].partition("'`")[0]
    environ = {"TOPOBUS_ALL__NODE": "n"}
    from_file = load_settings(GpuSettings, "gpu", file=file, environ=environ).pools
    from_environment = load_settings(
        GpuSettings, "gpu", file=None, environ={**environ, "TOPOBUS_GPU__POOLS": variable}
    ).pools

    assert fault_of_pools("gpu", from_file) == fault_of_pools("gpu", from_environment) == ""
    assert [pool_of(H100, from_file), pool_of(H100, from_environment)] == ["gpu-h100", "gpu-h100"]
