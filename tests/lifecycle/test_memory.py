"""A container's memory is charged to it: it meets its own limit, and the router stays within its bound.

Also: a container that punches holes into memory that it shares with the router blocks the worker a few times at most.
The checks that are about cgroups also run on cgroup v2, in an emulated guest (test_memory_v2.py).
"""

import pathlib
import time

import pytest

import harness
from harness import Failure, Host, memory, need

ROUNDS = 8
# The worker blocks until it knows who does it, and once more for each side of a copy.
BLOCKED_MAX = 6
# Bounce buffers of this many queue pairs, each with 256 KiB at a time, if all of them had one; and what they may take of the heap.
QPS = 2000
BOUNCE_MIB_MAX = 64

SIZES = memory.Sizes()


def bounced(host, container, program):
    """All of `QPS` copies are under way at once; the router's heap has one vNIC's budget of buffers, then and afterwards."""
    before = memory.anonymous_mib(host, "RssAnon")
    highest = 0
    running = container.start("env", "FREEFLOW_REMAP=off", program, "bounce", QPS)
    end = time.monotonic() + 90
    while "done" not in running.output():
        need(running.process.poll() is None, f"it ended:\n{running.output()}")
        need(time.monotonic() < end, f"not done:\n{running.output()}")
        highest = max(highest, memory.anonymous_mib(host, "RssAnon"))
        time.sleep(0.005)
    after = memory.anonymous_mib(host, "RssAnon")
    need(highest - before <= BOUNCE_MIB_MAX, f"the router's heap grew from {before} to {highest} MiB for {QPS} copies")
    container.kill_background()
    return f"the router's heap: {before} MiB before, {highest} MiB at most, {after} MiB afterwards"


def worker_switches(host):
    """How often the worker waited for something. In Fastpath it never sleeps: for a lock, or in a page fault."""
    for task in pathlib.Path(f"/proc/{host.router_pid()}/task").iterdir():
        if (task / "comm").read_text().strip() == "ff-worker":
            lines = (task / "status").read_text().splitlines()
            return int(next(line for line in lines if line.startswith("voluntary")).split()[1])
    raise Failure("the router has no thread ff-worker")


def punched(host, container, program):
    before = worker_switches(host)
    output = container.exec(program, "punch", ROUNDS, seconds=100)
    blocked = worker_switches(host) - before
    counted = host.status()["counters"].get("blocked_copies")
    need(f"done {ROUNDS} rounds" in output, output)
    need(blocked <= BLOCKED_MAX, f"the worker waited {blocked} times ({counted} counted) while memory was punched out")
    return f"{output.strip()}; the worker waited {blocked} times, of which {counted} are known to be its memory's"


@pytest.fixture(scope="module")
def host():
    with Host("--mode", "fastpath", "--workers", "1") as host:
        host.freeflow("network", "set", "default", "--data-path", "routed")
        yield host


@pytest.fixture(scope="module")
def groups():
    if why := memory.Group.why_not():
        harness.skip_lacking(why)


def test_all_that_limits_allow(host, container, groups):
    memory.hoarded(host, container, harness.program("hoard"), SIZES)


def test_container_pays_for_its_memory(host, container, groups):
    memory.within_its_limit(host, container, harness.program("memory"), "fill", SIZES)


def test_container_pays_for_what_it_registers(host, container, groups):
    memory.within_its_limit(host, container, harness.program("memory"), "move", SIZES)


def test_container_meets_its_own_limit(host, container, groups):
    memory.beyond_its_limit(host, container, host.container("b"), harness.program("memory"), SIZES)


def test_copies_by_the_slow_path_at_once(host, container):
    bounced(host, container, harness.program("memory"))


def test_holes_punched_while_the_worker_copies(host, container):
    punched(host, container, harness.program("memory"))
