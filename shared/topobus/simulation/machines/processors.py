"""Builds the files of CPUs and NUMA nodes, as a pure function of the profile and the set of online
CPUs.

As in the kernel, an offline CPU keeps its folder and its `online` file and loses topology, caches
and node link. Lists of other CPUs omit it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from topobus.simulation.machines.content import Content
from topobus.simulation.machines.profile import CoreGroup, Profile
from topobus.values.idset import CpuSet, NodeSet

__all__ = ["Thread", "all_threads", "cpu_content", "cpus_of_node", "mask", "numa_content", "proc_content"]

_CPU = "sys/devices/system/cpu"
_NODE = "sys/devices/system/node"
_GIB = 1 << 30
_HYBRID_FOLDERS = {"performance": "cpu_core", "efficiency": "cpu_atom", "low-power": "cpu_lowpower"}


@dataclass(frozen=True, kw_only=True)
class Thread:
    """One logical CPU. `core`, `l2` and `l3` number their kind over the whole machine. `core_id` is
    the kernel's, unique in the socket.
    """

    cpu: int
    core: int
    core_id: int
    socket: int
    node: int
    l2: int
    l3: int
    group: CoreGroup


def all_threads(profile: Profile) -> tuple[Thread, ...]:
    """Number all logical CPUs of a profile, sorted by id."""
    part = profile.cpu
    cores_per_socket = sum(group.count for group in part.cores)
    total_cores = cores_per_socket * part.sockets
    threads: list[Thread] = []
    core, l2, next_cpu = 0, -1, 0
    for socket in range(part.sockets):
        core_id = 0
        for group in part.cores:
            for index in range(group.count):
                l2 += index % group.l2_cores == 0
                width = part.l3_cores or cores_per_socket
                node = (
                    socket * profile.numa.nodes_per_socket + core_id * profile.numa.nodes_per_socket // cores_per_socket
                )
                for thread in range(group.threads):
                    cpu = thread * total_cores + core if part.numbering == "split" else next_cpu
                    next_cpu += 1
                    l3 = socket * -(-cores_per_socket // width) + core_id // width
                    threads.append(
                        Thread(cpu=cpu, core=core, core_id=core_id, socket=socket, node=node, l2=l2, l3=l3, group=group)
                    )
                core_id += 1
                core += 1
    return tuple(sorted(threads, key=lambda thread: thread.cpu))


def cpus_of_node(profile: Profile, node: int, online: CpuSet) -> CpuSet:
    """Return the online CPUs of a node. For -1 all online ones, as in `local_cpulist`."""
    if node < 0:
        return online
    return CpuSet.of(thread.cpu for thread in all_threads(profile) if thread.node == node) & online


def cpu_content(profile: Profile, online: CpuSet) -> Content:
    """Files of all CPUs."""
    content = Content()
    threads = all_threads(profile)
    present = CpuSet.of(thread.cpu for thread in threads)
    content.attributes(
        _CPU,
        {
            "online": online,
            "possible": present,
            "present": present,
            "offline": present - online,
            "isolated": "",
            "kernel_max": 8191,
        },
    )
    is_smt = any(group.threads > 1 for group in profile.cpu.cores)
    content.attributes(f"{_CPU}/smt", {"active": int(is_smt), "control": "on" if is_smt else "notsupported"})
    sharing: dict[tuple[str, int], int] = defaultdict(int)
    for thread in threads:
        if thread.cpu in online:
            for kind, number in (
                ("core", thread.core),
                ("socket", thread.socket),
                ("l2", thread.l2),
                ("l3", thread.l3),
            ):
                sharing[kind, number] |= 1 << thread.cpu
    for thread in threads:
        if thread.cpu != 0:
            # CPU 0 cannot go offline on most machines, and has no such file then.
            content.text(f"{_CPU}/cpu{thread.cpu}/online", int(thread.cpu in online))
        if thread.cpu in online:
            _add_online(content, profile, thread, sharing)
    kinds = {group.kind for group in profile.cpu.cores if group.kind}
    for kind in sorted(kinds):
        cpus = CpuSet.of(thread.cpu for thread in threads if thread.group.kind == kind and thread.cpu in online)
        content.text(f"sys/devices/{_HYBRID_FOLDERS[kind]}/cpus", cpus)
    return content


def numa_content(profile: Profile, online: CpuSet) -> Content:
    """Files of all NUMA nodes."""
    content = Content()
    near, memory = _nodes(profile)
    ids = NodeSet.of(near)
    with_memory = NodeSet.of(node for node in near if memory[node])
    with_cpus = NodeSet.of(node for node in near if cpus_of_node(profile, node, online))
    content.attributes(
        _NODE,
        {
            "online": ids,
            "possible": ids,
            "has_cpu": with_cpus,
            "has_memory": with_memory,
            "has_normal_memory": with_memory,
        },
    )
    for node in ids:
        folder = f"{_NODE}/node{node}"
        cpus = cpus_of_node(profile, node, online)
        content.attributes(folder, {"cpulist": cpus, "cpumap": mask(cpus)})
        content.text(f"{folder}/distance", " ".join(str(_distance(profile, near, node, other)) for other in ids))
        total = memory[node] // 1024
        content.text(
            f"{folder}/meminfo",
            "\n".join(
                f"Node {node} {name}:{value:>15} kB"
                for name, value in (("MemTotal", total), ("MemFree", total * 9 // 10), ("MemUsed", total // 10))
            ),
        )
        if node < profile.cpu.sockets * profile.numa.nodes_per_socket:
            for size_kib, pages in profile.numa.hugepages.items():
                content.attributes(
                    f"{folder}/hugepages/hugepages-{size_kib}kB",
                    {"nr_hugepages": pages, "free_hugepages": pages, "surplus_hugepages": 0},
                )
        for cpu in cpus:
            content.link(f"{folder}/cpu{cpu}", f"{_CPU}/cpu{cpu}")
            content.link(f"{_CPU}/cpu{cpu}/node{node}", folder)
    for size_kib, pages in profile.numa.hugepages.items():
        every = pages * profile.cpu.sockets * profile.numa.nodes_per_socket
        content.attributes(
            f"sys/kernel/mm/hugepages/hugepages-{size_kib}kB",
            {"nr_hugepages": every, "free_hugepages": every, "resv_hugepages": 0},
        )
    return content


def mask(cpus: CpuSet) -> str:
    """Write a set as the kernel's mask: hexadecimal words of 32 bits, the highest first."""
    bits = cpus.bits
    words = [f"{bits & 0xFFFFFFFF:08x}"]
    while bits := bits >> 32:
        words.append(f"{bits & 0xFFFFFFFF:08x}")
    return ",".join(reversed(words))


def proc_content(profile: Profile, online: CpuSet, boot_id: str) -> Content:
    """Minimal /proc: cpuinfo, meminfo, stat, boot id."""
    content = Content()
    threads = {thread.cpu: thread for thread in all_threads(profile)}
    blocks: list[str] = []
    for cpu in online:
        cpu_thread = threads[cpu]
        if profile.architecture == "x86_64":
            blocks.append(
                f"processor\t: {cpu}\nvendor_id\t: {profile.cpu.vendor}\nmodel name\t: {profile.cpu.model}\n"
                f"physical id\t: {cpu_thread.socket}\ncore id\t\t: {cpu_thread.core_id}\n"
            )
        else:
            blocks.append(f"processor\t: {cpu}\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU part\t: 0xd4f\n")
    content.text("proc/cpuinfo", "\n".join(blocks))
    _, memory = _nodes(profile)
    total = sum(memory.values()) // 1024
    content.text(
        "proc/meminfo",
        f"MemTotal:       {total} kB\nMemFree:        {total * 9 // 10} kB\nMemAvailable:   {total * 9 // 10} kB",
    )
    stat = "".join(f"cpu{cpu} 0 0 0 0 0 0 0 0 0 0\n" for cpu in online)
    content.text("proc/stat", f"cpu  0 0 0 0 0 0 0 0 0 0\n{stat}btime 1760000000\nprocesses 1")
    content.text("proc/sys/kernel/random/boot_id", boot_id)
    content.text("proc/version", f"Linux version 6.8.0-recorded ({profile.architecture})")
    return content


def _add_online(content: Content, profile: Profile, thread: Thread, sharing: dict[tuple[str, int], int]) -> None:
    core = CpuSet.from_bits(sharing["core", thread.core])
    socket = CpuSet.from_bits(sharing["socket", thread.socket])
    content.attributes(
        f"{_CPU}/cpu{thread.cpu}/topology",
        {
            "core_id": thread.core_id,
            "physical_package_id": thread.socket,
            "die_id": 0,
            "cluster_id": 65535,
            "thread_siblings_list": core,
            "core_cpus_list": core,
            "core_cpus": mask(core),
            "core_siblings_list": socket,
            "package_cpus_list": socket,
            "package_cpus": mask(socket),
            "die_cpus_list": socket,
            "die_cpus": mask(socket),
        },
    )
    caches = [(1, "Data", thread.group.l1d_kib, core), (1, "Instruction", thread.group.l1i_kib, core)]
    caches.append((2, "Unified", thread.group.l2_kib, CpuSet.from_bits(sharing["l2", thread.l2])))
    if profile.cpu.l3_kib:
        caches.append((3, "Unified", profile.cpu.l3_kib, CpuSet.from_bits(sharing["l3", thread.l3])))
    for index, (level, kind, size_kib, shared) in enumerate(caches):
        content.attributes(
            f"{_CPU}/cpu{thread.cpu}/cache/index{index}",
            {
                "level": level,
                "type": kind,
                "size": f"{size_kib}K",
                "shared_cpu_list": shared,
                "shared_cpu_map": mask(shared),
                "id": {1: thread.core, 2: thread.l2, 3: thread.l3}[level],
            },
        )


def _nodes(profile: Profile) -> tuple[dict[int, int], dict[int, int]]:
    """Give node to socket, and node to bytes of memory."""
    near: dict[int, int] = {}
    memory: dict[int, int] = {}
    for node in range(profile.cpu.sockets * profile.numa.nodes_per_socket):
        near[node] = node // profile.numa.nodes_per_socket
        memory[node] = profile.numa.memory_gib * _GIB
    for part in profile.numa.memory_only:
        for node in NodeSet.parse(part.ids):
            near[node] = part.socket
            memory[node] = part.memory_gib * _GIB
    return near, memory


def _distance(profile: Profile, near: dict[int, int], first: int, second: int) -> int:
    rules = {
        "same_socket": 12,
        "other_socket": 20,
        "memory_near": 20,
        "memory_far": 30,
        "memory_other": 30,
        **profile.numa.distances,
    }
    if first == second:
        return 10
    with_cpus = profile.cpu.sockets * profile.numa.nodes_per_socket
    is_near = near[first] == near[second]
    if first < with_cpus and second < with_cpus:
        return rules["same_socket" if is_near else "other_socket"]
    if first >= with_cpus and second >= with_cpus:
        return rules["memory_other"]
    return rules["memory_near" if is_near else "memory_far"]
