"""Charges for memory: cgroups of a container and of the router, in either version's hierarchy."""

import contextlib
import dataclasses
import json
import os
import pathlib
import tempfile
import time

from harness import settings
from harness.failure import need
from harness.host import router_of
from harness.processes import Running

# Most that the router's own group is charged while a container moves `filled_mib`: its heap, stacks, rings.
ROUTER_MIB_MAX = 32
# docs/SECURITY.md: what a container costs the host beyond its own limit, and the limit of its rings, which is part of it.
PROMISED_MIB = 1024
RING_MIB_MAX = 512
# CQs of 128 MiB that a container may have at most, whatever else it has.
LARGE_CQS_MAX = RING_MIB_MAX // 128
# The kernel's memory for a segment that the router maps: inode, dentry, file, area.
KERNEL_KIB_OF_MAPPING = 2
RING_MIB_OF_WRITER = 2
FILL_SECONDS, HOARD_SECONDS, GONE_SECONDS = 180, 300, 90


@dataclasses.dataclass(frozen=True)
class Sizes:
    # Memory that a container moves, and a limit that is too small for that.
    filled_mib: int = 192
    small_mib: int = 48
    # Objects of each kind: all that the limits allow, or enough to see what each takes.
    hoard_most: int = 1 << 20 if settings.FULL else 20_000
    # Queue pairs that fill the CQ of 128 MiB.
    hoard_writers: int = 64


class Group:
    """A memory cgroup, in either version's hierarchy."""

    V1, V2 = pathlib.Path("/sys/fs/cgroup/memory"), pathlib.Path("/sys/fs/cgroup")

    def __init__(self, path):
        self.is_v1 = self.has_v1()
        self.path = (self.V1 if self.is_v1 else self.V2) / path

    @staticmethod
    def has_v1():
        return (Group.V1 / "memory.limit_in_bytes").exists()

    @staticmethod
    def why_not():
        """Why there are none here; None if there are."""
        if Group.has_v1():
            return None
        controllers = Group.V2 / "cgroup.subtree_control"
        return None if controllers.exists() and "memory" in controllers.read_text() else "no memory controller"

    def limit(self, mib):
        (self.path / ("memory.limit_in_bytes" if self.is_v1 else "memory.max")).write_text(str(mib << 20))

    def used_mib(self):
        return int((self.path / ("memory.usage_in_bytes" if self.is_v1 else "memory.current")).read_text()) >> 20

    def refused_count(self):
        """How often it was at its limit."""
        if self.is_v1:
            return int((self.path / "memory.failcnt").read_text())
        events = dict(line.split() for line in (self.path / "memory.events").read_text().splitlines())
        return int(events["max"])

    def take(self, pid):
        (self.path / "cgroup.procs").write_text(str(pid))

    def start(self, container, *command):
        """A program of the container, in this group from its beginning."""
        words = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', self.path, *container.command(*command)]
        running = Running(words)
        container.background.append(running)
        return running

    def remove(self):
        """It goes away empty."""
        parent = self.path.parent / "cgroup.procs"
        for pid in (self.path / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                parent.write_text(pid)
        end = time.monotonic() + 20
        while True:
            try:
                return self.path.rmdir()
            except OSError:  # a task that ends is still there
                need(time.monotonic() < end, f"{self.path} does not become empty")
                time.sleep(0.05)


@contextlib.contextmanager
def groups(*names):
    made = []
    try:
        for name in names:
            group = Group(f"freeflow-test-{os.getpid()}-{name}")
            group.path.mkdir()
            made.append(group)
        yield made
    finally:
        for group in made:
            group.remove()


@contextlib.contextmanager
def groups_of(host):
    """A group for a container, and the router's.

    That is its own on v2. On v1 the tests' routers stay in their caller's (FREEFLOW_CGROUP_KEEP), so it moves to one of
    the test's.
    """
    if Group.has_v1():
        with groups("container", "router") as (its, routers):
            routers.take(host.router_pid())
            yield its, routers
    else:
        line = pathlib.Path(f"/proc/{host.router_pid()}/cgroup").read_text().strip()
        name = line.removeprefix("0::/")
        need(name.startswith("freeflow-") and "/" not in name, f"the router has no group of its own but is in {line}")
        with groups("container") as (its,):
            yield its, Group(name)


@dataclasses.dataclass
class Filled:
    """The program's output, its exit code (None: it goes on), the charge then, and the new charge of the router."""

    output: str
    code: int | None
    its_mib: int
    routers_mib: int
    refused_count: int
    routers_refused_count: int


def fill(host, container, program, how, sizes, limit_mib):
    """`how`: into holes of memory that is shared ("fill"), or by ordinary memory that is moved ("move")."""
    with groups_of(host) as (its, routers), tempfile.TemporaryDirectory() as directory:
        before, refused_before = routers.used_mib(), routers.refused_count()
        gate = pathlib.Path(directory) / "gate"
        running = its.start(container, program, how, sizes.filled_mib, gate)
        try:
            running.wait_for_output("empty", FILL_SECONDS)
            its.limit(limit_mib)
            gate.touch()
            end = time.monotonic() + FILL_SECONDS
            while running.process.poll() is None and "done" not in running.output():
                need(time.monotonic() < end, f"neither filled nor refused:\n{running.output()}")
                time.sleep(0.02)
            return Filled(running.output(), running.process.poll(), its.used_mib(), routers.used_mib() - before,
                          its.refused_count(), routers.refused_count() - refused_before)
        finally:
            container.kill_background()


def within_its_limit(host, container, program, how, sizes):
    filled = fill(host, container, program, how, sizes, 4 * sizes.filled_mib)
    need(filled.code is None and f"done {sizes.filled_mib} MiB" in filled.output, f"it ended or lacks some: {filled}")
    need(filled.its_mib >= sizes.filled_mib, f"{sizes.filled_mib} MiB were written: {filled}")
    need(filled.routers_mib <= ROUTER_MIB_MAX, f"the router pays {filled.routers_mib} MiB for a container's: {filled}")
    return f"the container pays {filled.its_mib} MiB, the router {filled.routers_mib} MiB"


def beyond_its_limit(host, container, other, program, sizes):
    """Another container's program is at work all the time, and a further one begins afterwards."""
    pid = host.router_pid()
    with tempfile.TemporaryDirectory() as directory:
        gate = pathlib.Path(directory) / "gate"
        neighbour = other.start(program, "exchange", gate)
        try:
            neighbour.wait_for_output("begun", FILL_SECONDS)
            filled = fill(host, container, program, "fill", sizes, sizes.small_mib)
            need(neighbour.process.poll() is None, f"its neighbour ended:\n{neighbour.output()}")
            gate.touch()
            code = neighbour.wait(FILL_SECONDS)
            need(code == 0 and "done" in neighbour.output(), f"its neighbour gave {code}:\n{neighbour.output()}")
            other.exec(program, "exchange", gate, seconds=FILL_SECONDS)
        finally:
            other.kill_background()
    need(filled.code is not None and "done" not in filled.output, f"that fits into {sizes.small_mib} MiB: {filled}")
    need(filled.refused_count, f"its group was never at its limit: {filled}")
    need(filled.routers_mib <= ROUTER_MIB_MAX and not filled.routers_refused_count, f"the router pays for it: {filled}")
    need(host.router_pid() == pid and router_of(pid, host.run_dir), "the router died")
    done = neighbour.output().splitlines()[-1]
    return f"it ended with {filled.code}, the router pays {filled.routers_mib} MiB, its neighbour has {done}"


def anonymous_mib(host, key):
    lines = pathlib.Path(f"/proc/{host.router_pid()}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1]) >> 10


def resources_of(host, container):
    vnics = json.loads(host.freeflow("get", "vnics", "-o", "json"))["items"]
    vnic = next(vnic for vnic in vnics if container.ip in vnic["spec"]["addresses"])
    described = host.freeflow("describe", "vnic", vnic["metadata"]["name"])
    for line in ("Resources:", "Used:", "Limits:", "Ring bytes:", "Heap bytes:"):
        need(line in described, f"no line {line} in\n{described}")
    resources = vnic["status"]["resources"]
    for name, used in resources["used"].items():
        need(used <= resources["limits"][name], f"{name}: {used} of {resources['limits'][name]}")
    return resources["used"], resources["limits"]


def ring_bytes_max():
    """A vNIC that is alone gets three quarters of the eighth of the machine's memory that all may have."""
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal:"))
    return min(RING_MIB_MAX << 20, kib * 1024 // 8 * 3 // 4)


def hoarded(host, container, program, sizes):
    """Of all that limits give a container it takes as much as it gets; the router's memory is within what `describe` says."""
    filled_mib = sizes.hoard_writers * RING_MIB_OF_WRITER
    with groups_of(host) as (its, routers):
        heap_before, before = anonymous_mib(host, "RssAnon"), routers.used_mib()
        running = its.start(container, "env", "FREEFLOW_REMAP=off", program, sizes.hoard_most, sizes.hoard_writers)
        end = time.monotonic() + HOARD_SECONDS
        while "done" not in running.output():
            need(running.process.poll() is None, f"it ended:\n{running.output()}")
            need(time.monotonic() < end, f"not done:\n{running.output()}")
            time.sleep(0.05)
        made = {name: int(count) for _, count, name in map(str.split, running.output().splitlines()[1:-1])}
        used, limits = resources_of(host, container)
        heap, mib = anonymous_mib(host, "RssAnon") - heap_before, routers.used_mib() - before
        container.kill_background()
        # One of them was made before.
        need(made["large-cqs"] < LARGE_CQS_MAX, f"{made['large-cqs'] + 1} CQs of 128 MiB were made")
        need(limits["ringBytes"] == ring_bytes_max(), f"the limit of rings is {limits['ringBytes']}")
        need(mib >= filled_mib, f"the router pays {mib} MiB, and wrote to {filled_mib} MiB of a CQ")
        need(heap << 20 <= used["heapBytes"], f"the heap grew by {heap} MiB, and `describe` says {used['heapBytes'] >> 20}: {made}")
        kernel = used["mappings"] * KERNEL_KIB_OF_MAPPING << 10
        said = used["ringBytes"] + used["heapBytes"] + used["bounceBytes"] + kernel >> 20
        need(mib <= said <= PROMISED_MIB, f"the router pays {mib} MiB; by what `describe` says it is {said} at most: {made}")
        left, lowest, end = used, mib, time.monotonic() + GONE_SECONDS
        while left["ringBytes"] or left["heapBytes"] or lowest > heap + ROUTER_MIB_MAX:
            need(time.monotonic() < end, f"the program has ended; the router pays {lowest} MiB, {heap} of them heap, for {left}")
            time.sleep(0.1)
            left, lowest = resources_of(host, container)[0], routers.used_mib() - before
    return f"{made}; the router paid {mib} MiB, {heap} of them heap, of {said} at most, and {lowest} afterwards"
