#!/usr/bin/env python3
"""What a container takes of the host's memory is its own: it meets its own limit, and the router stays within its bound.

Also: a container that punches holes into memory that it shares with the router blocks the worker a few times at most.
"""

import contextlib
import json
import os
import pathlib
import tempfile
import time

import lib
from lib import need

FILLED_MIB = 192
SMALL_MIB = 48
# What the router's own group may be charged while a container moves `FILLED_MIB`: its heap, stacks, rings.
ROUTER_MIB_MAX = 32
ROUNDS = 8
# The worker blocks until it knows who does it, and once more for each side of a copy.
BLOCKED_MAX = 6


# Bounce buffers of this many queue pairs, each with 256 KiB at a time, if all of them had one; and what they may take of the heap.
QPS = 2000
BOUNCE_MIB_MAX = 64


# docs/SECURITY.md: what a container costs the host beyond its own limit, and the limit of its rings, which is part of it.
PROMISED_MIB = 1024
RING_MIB_MAX = 512
# CQs of 128 MiB that a container may have at most, whatever else it has.
LARGE_CQS_MAX = RING_MIB_MAX // 128
# The kernel's memory for a segment that the router maps: inode, dentry, file, area.
KERNEL_KIB_OF_MAPPING = 2
# Objects of each kind: all that the limits allow, or enough to see what each takes.
HOARD_MOST = 1 << 20 if lib.FULL else 20_000


class Group:
    """A memory cgroup of its own, in either version's hierarchy, which goes away empty."""

    V1, V2 = pathlib.Path("/sys/fs/cgroup/memory"), pathlib.Path("/sys/fs/cgroup")

    def __init__(self, name):
        self.is_v1 = (self.V1 / "memory.limit_in_bytes").exists()
        self.path = (self.V1 if self.is_v1 else self.V2) / f"freeflow-test-{os.getpid()}-{name}"
        self.path.mkdir()

    @staticmethod
    def why_not():
        """Why there are none here; None if there are."""
        if (Group.V1 / "memory.limit_in_bytes").exists():
            return None
        controllers = Group.V2 / "cgroup.subtree_control"
        return None if controllers.exists() and "memory" in controllers.read_text() else "no memory controller"

    def limit(self, mib):
        (self.path / ("memory.limit_in_bytes" if self.is_v1 else "memory.max")).write_text(str(mib << 20))

    def used_mib(self):
        return int((self.path / ("memory.usage_in_bytes" if self.is_v1 else "memory.current")).read_text()) >> 20

    def take(self, pid):
        (self.path / "cgroup.procs").write_text(str(pid))

    def start(self, container, *command):
        """A program of the container, in this group from its beginning."""
        words = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', self.path, *container.command(*command)]
        running = lib.Running(words)
        container.background.append(running)
        return running

    def remove(self):
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
            made.append(Group(name))
        yield made
    finally:
        for group in made:
            group.remove()


def fill(host, container, program, limit_mib):
    """What the program said, its exit code (None: it goes on), and what container and router are charged then."""
    with contextlib.ExitStack() as stack:
        its, routers = stack.enter_context(groups("container", "router"))
        routers.take(host.router_pid())
        gate = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())) / "gate"
        running = its.start(container, program, "fill", FILLED_MIB, gate)
        try:
            running.wait_for_output("empty")
            its.limit(limit_mib)
            gate.touch()
            end = time.monotonic() + 60
            while running.process.poll() is None and "done" not in running.output():
                need(time.monotonic() < end, f"neither filled nor refused:\n{running.output()}")
                time.sleep(0.02)
            return running.output(), running.process.poll(), its.used_mib(), routers.used_mib()
        finally:
            container.kill_background()


def within_its_limit(host, container, program):
    output, code, its_mib, routers_mib = fill(host, container, program, 4 * FILLED_MIB)
    need(code is None and f"done {FILLED_MIB} MiB" in output, f"exit code {code}:\n{output}")
    need(its_mib >= FILLED_MIB, f"{FILLED_MIB} MiB were written and the container pays {its_mib} MiB")
    need(routers_mib <= ROUTER_MIB_MAX, f"the router pays {routers_mib} MiB for a container that has {its_mib} MiB")
    return f"the container pays {its_mib} MiB, the router {routers_mib} MiB"


def beyond_its_limit(host, container, program):
    pid = host.router_pid()
    output, code, _, routers_mib = fill(host, container, program, SMALL_MIB)
    need(code is not None and "done" not in output, f"{FILLED_MIB} MiB fit into {SMALL_MIB} MiB:\n{output}")
    need(routers_mib <= ROUTER_MIB_MAX, f"the router pays {routers_mib} MiB for a container at its limit")
    need(host.router_pid() == pid and lib.router_of(pid, host.run_dir), "the router died")
    return f"the program ended with {code}, the router pays {routers_mib} MiB"


def anonymous_mib(host, key):
    lines = pathlib.Path(f"/proc/{host.router_pid()}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1]) >> 10


def bounced(host, container, program):
    """All of `QPS` copies are under way at once; the router's heap has one vNIC's budget of buffers, then and afterwards."""
    before = anonymous_mib(host, "RssAnon")
    highest = 0
    running = container.start("env", "FREEFLOW_REMAP=off", program, "bounce", QPS)
    end = time.monotonic() + 90
    while "done" not in running.output():
        need(running.process.poll() is None, f"it ended:\n{running.output()}")
        need(time.monotonic() < end, f"not done:\n{running.output()}")
        highest = max(highest, anonymous_mib(host, "RssAnon"))
        time.sleep(0.005)
    after = anonymous_mib(host, "RssAnon")
    need(highest - before <= BOUNCE_MIB_MAX, f"the router's heap grew from {before} to {highest} MiB for {QPS} copies")
    container.kill_background()
    return f"the router's heap: {before} MiB before, {highest} MiB at most, {after} MiB afterwards"


def worker_switches(host):
    """How often the worker waited for something. In Fastpath it never sleeps: for a lock, or in a page fault."""
    for task in pathlib.Path(f"/proc/{host.router_pid()}/task").iterdir():
        if (task / "comm").read_text().strip() == "ff-worker":
            lines = (task / "status").read_text().splitlines()
            return int(next(line for line in lines if line.startswith("voluntary")).split()[1])
    raise lib.Failure("the router has no thread ff-worker")


def punched(host, container, program):
    before = worker_switches(host)
    output = container.exec(program, "punch", ROUNDS, seconds=100)
    blocked = worker_switches(host) - before
    counted = host.status()["counters"].get("blocked_copies")
    need(f"done {ROUNDS} rounds" in output, output)
    need(blocked <= BLOCKED_MAX, f"the worker waited {blocked} times ({counted} counted) while memory was punched out")
    return f"{output.strip()}; the worker waited {blocked} times, of which {counted} are known to be its memory's"


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


def hoarded(host, container, program):
    """Of all that limits give a container it takes as much as it gets; the router's memory is within what `describe` says."""
    with groups("container", "router") as (its, routers):
        routers.take(host.router_pid())
        heap_before, before = anonymous_mib(host, "RssAnon"), routers.used_mib()
        running = its.start(container, "env", "FREEFLOW_REMAP=off", program, HOARD_MOST)
        end = time.monotonic() + 300
        while "done" not in running.output():
            need(running.process.poll() is None, f"it ended:\n{running.output()}")
            need(time.monotonic() < end, f"not done:\n{running.output()}")
            time.sleep(0.05)
        made = {name: int(count) for _, count, name in map(str.split, running.output().splitlines()[1:-1])}
        used, limits = resources_of(host, container)
        heap, mib = anonymous_mib(host, "RssAnon") - heap_before, routers.used_mib() - before
        container.kill_background()
        # One of them was made before, and filled.
        need(made["large-cqs"] < LARGE_CQS_MAX, f"{made['large-cqs'] + 1} CQs of 128 MiB were made")
        need(limits["ringBytes"] == RING_MIB_MAX << 20, f"the limit of rings is {limits['ringBytes']}")
        need(mib >= 128, f"the router pays {mib} MiB, and wrote to all pages of a CQ of 128 MiB")
        need(heap << 20 <= used["heapBytes"], f"the heap grew by {heap} MiB, and `describe` says {used['heapBytes'] >> 20}: {made}")
        kernel = used["mappings"] * KERNEL_KIB_OF_MAPPING << 10
        said = used["ringBytes"] + used["heapBytes"] + used["bounceBytes"] + kernel >> 20
        need(mib <= said <= PROMISED_MIB, f"the router pays {mib} MiB; by what `describe` says it is {said} at most: {made}")
        left, lowest, end = used, mib, time.monotonic() + 90
        while left["ringBytes"] or left["heapBytes"] or lowest > heap + ROUTER_MIB_MAX:
            need(time.monotonic() < end, f"the program has ended; the router pays {lowest} MiB, {heap} of them heap, for {left}")
            time.sleep(0.1)
            left, lowest = resources_of(host, container)[0], routers.used_mib() - before
    return f"{made}; the router paid {mib} MiB, {heap} of them heap, of {said} at most, and {lowest} afterwards"


def test(checks):
    lib.require_root()
    program = lib.program("memory")
    with lib.Host("--mode", "fastpath", "--workers", "1") as host:
        host.freeflow("network", "set", "default", "--data-path", "routed")
        container = host.container("a")
        if why := Group.why_not():
            checks.skip("memory that the router touches first", why)
        else:
            checks.check("all that limits allow", hoarded, host, container, lib.program("hoard"))
            checks.check("a container pays for its memory", within_its_limit, host, container, program)
            checks.check("a container meets its own limit", beyond_its_limit, host, container, program)
        checks.check(f"{QPS} copies by the slow path at once", bounced, host, container, program)
        checks.check("holes punched while the worker copies", punched, host, container, program)


if __name__ == "__main__":
    lib.main(test)
