"""kubelet's lists, one after the other: each is read as one that nothing came before."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from support.laws import examples
from topobus.gateway.device_plugins.pod_contents import PodContents
from topobus.kubeletpb.podresources.v1 import api_pb2 as pb

NAMES = st.sampled_from(["a", "b"])
TOPOLOGIES = st.builds(
    lambda nodes: pb.TopologyInfo(nodes=[pb.NUMANode(ID=node) for node in nodes]),
    st.lists(st.integers(0, 1), max_size=2),
)
DEVICES = st.builds(
    lambda resource, ids, topology: pb.ContainerDevices(resource_name=resource, device_ids=ids, topology=topology),
    st.sampled_from(["topobus.dev/gpu", "other.dev/x"]),
    st.lists(NAMES, max_size=2),
    TOPOLOGIES,
)
MEMORY = st.builds(
    lambda size, topology: pb.ContainerMemory(memory_type="memory", size=size, topology=topology),
    st.integers(0, 5),
    TOPOLOGIES,
)
CLAIMS = st.builds(
    lambda name, driver, device: pb.DynamicResource(
        claim_namespace="d",
        claim_name=name,
        claim_resources=[pb.ClaimResource(driver_name=driver, pool_name="n", device_name=device)],
    ),
    NAMES,
    st.sampled_from(["topobus.dev", "gpu.example.com"]),
    NAMES,
)
CONTAINERS = st.builds(
    lambda name, devices, cpus, memory, claims: pb.ContainerResources(
        name=name, devices=devices, cpu_ids=cpus, memory=memory, dynamic_resources=claims
    ),
    NAMES,
    st.lists(DEVICES, max_size=2),
    st.lists(st.integers(0, 3), max_size=2),
    st.lists(MEMORY, max_size=1),
    st.lists(CLAIMS, max_size=1),
)
PODS = st.builds(
    lambda name, containers, cpus: pb.PodResources(namespace="d", name=name, containers=containers, cpu_ids=cpus),
    NAMES,
    st.lists(CONTAINERS, max_size=2),
    st.lists(st.integers(0, 3), max_size=2),
)
ANSWERS = st.lists(PODS, max_size=3).map(lambda pods: pb.ListPodResourcesResponse(pod_resources=pods))


@given(st.lists(ANSWERS, min_size=1, max_size=3), st.lists(st.booleans(), max_size=3))
@settings(max_examples=examples(300))
def test_each_list_is_read_as_if_nothing_came_before(
    answers: list[pb.ListPodResourcesResponse], repeats: list[bool]
) -> None:
    """Whatever was listed before, also under the same name or word for word, each pod has what a
    new reader gives it.

    What was said before is the same object.
    """
    contents = PodContents()

    for answer, is_repeated in zip(answers, [*repeats, *(True for _ in answers)], strict=False):
        read = contents.read(answer)
        assert read == PodContents().read(answer)
        names = [pod.name for pod in answer.pod_resources]
        if is_repeated and len({*names}) == len(names):
            again = contents.read(pb.ListPodResourcesResponse.FromString(answer.SerializeToString()))
            assert [content is earlier for (_, content), (_, earlier) in zip(again, read, strict=True)] == [True] * len(
                read
            )
