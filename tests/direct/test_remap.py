"""Re-mapping of registered memory: what is zero-copy, that nothing is lost while it changes, that nothing is left.

The cases are of tests/programs/remap.c; here they run in containers, with other allocators, under a tracer, without the
router's help, and from Python's and Java's heaps.
"""

import contextlib
import itertools
import os
import pathlib
import re
import time

import pytest

import harness
from harness import need, podman
from harness.settings import ATTACHMENT, FULL, WORKERS

SECONDS = "20" if FULL else "2"
COUNT = "100000" if FULL else "20000"
ROUNDS = "200" if FULL else "12"
LIBRARIES = pathlib.Path("/usr/lib/x86_64-linux-gnu")
ALLOCATORS = {"jemalloc": LIBRARIES / "libjemalloc.so.2", "tcmalloc": LIBRARIES / "libtcmalloc_minimal.so.4"}
HUGE_PAGES = pathlib.Path("/proc/sys/vm/nr_hugepages")
NOT_HERE = 77  # what a case ends with that needs something of the machine
ALONE = ("kinds", "data", "overlap", "rereg", "resident", "stale", "fork", "limit", "many",
         "renewed", "renewed-heap", "renewed-small", "renewed-on-demand", "renewed-moved",
         "renewed-atomics")
SMALL = ("small", "small-again", "small-writers", "small-fork", "small-devices", "small-stale")
EDGES = ("edges", "edges-shared", "edges-fleeting", "edges-writers", "edges-signals", "edges-fork", "edges-forks", "edges-allocator")
BESIDE = ("edges-lowest", "edges-on-demand", "edges-file", "edges-leader", "edges-immovable", "edges-unstoppable",
          "edges-foreign", "edges-uring", "edges-data-limit", "edges-far")
FORKS = ("forks-busy", "forks-grandchild", "forks-beside", "forks-handler", "forks-cancelled", "forks-scattered")
# Memory that the program shares by a file of its own; the last two are about the router's mapping of it.
BORROWED = ("borrowed", "borrowed-not", "borrowed-changes", "borrowed-renewed", "borrowed-processes", "borrowed-swapped", "borrowed-storm",
            *(("borrowed-freed", "borrowed-atomics") if ATTACHMENT == "local" else ()))
# Of these, all bytes but those of ordinary partial pages go by segments; gigabytes would go by the slow path.
WHOLLY_BORROWED = ("borrowed", "borrowed-processes")
SLOW_BYTES_MAX = 2 << 20
THREADS = ("writers", "signals", "reads", "calls", "atomics", "allocator", "fork-threads", "shared-again")

# Those in which bytes are moved: with several workers only they are run again.
WITH_TRAFFIC = ("data", "overlap", "rereg", "renewed", "renewed-on-demand", "renewed-atomics", "fork", "reads", "calls", "atomics", "fork-threads",
                "small-writers", "edges-shared", "edges-writers", "edges-forks", "forks-busy", "borrowed", "borrowed-changes", "borrowed-renewed", "borrowed-processes")

PYTHON = """
import ctypes, gc, sys
from pyverbs.device import Context
from pyverbs.pd import PD
from pyverbs.mr import MR
from pyverbs.enums import IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_WRITE
import pyverbs.device as device
context = Context(name=device.get_device_list()[0].name.decode())
pd = PD(context)
access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE
def placed(start, length):
    found = 0
    for line in open("/proc/self/maps"):
        area, rights = line.split()[:2]
        low, high = (int(end, 16) for end in area.split("-"))
        if rights[3] == "s" and "memfd:freeflow" in line:
            found += max(0, min(high, start + length) - max(low, start))
    return found
for turn in range(300):
    block = bytearray((turn + at) & 255 for at in range(40000 + turn * 10))
    wanted = bytes(block)
    view = (ctypes.c_char * len(block)).from_buffer(block)
    mr = MR(pd, len(block), access, ctypes.addressof(view))
    assert block == wanted
    assert placed(ctypes.addressof(view), len(block)) >= len(block) - 2 * 4096
    objects = [str(at) * 3 for at in range(2000)]
    mr.close()
    assert block == wanted and objects == [str(at) * 3 for at in range(2000)]
    del view, mr, objects
    gc.collect()
print("python: good")
"""


def extent_of(name):
    """The other cases are of what a registration moves: it shall move the whole pages of each region."""
    as_usual = name.startswith(("small", "edges", "forks", "borrowed"))
    return f"FREEFLOW_REMAP={'' if as_usual else 'eager'}"


def case(container, program, name, *words):
    settings = [extent_of(name), f"REMAP_SECONDS={SECONDS}", f"REMAP_COUNT={COUNT}", f"REMAP_ROUNDS={ROUNDS}"]
    output = container.exec("env", *settings, *words, program, name, seconds=240)
    need(f"{name}: good" in output, output)
    return "; ".join(line for line in output.splitlines() if ": good" not in line)[:160]


def preloaded(container, program, name, library):
    return case(container, program, name, "env", f"LD_PRELOAD={library}")


def refused(container, program):
    """FREEFLOW_REMAP=off leaves all memory where it is."""
    output = container.exec("env", "FREEFLOW_REMAP=off", program, "kinds", codes=(1,))
    need(re.search(r"pages: 0 bytes are placed", output), output)


def hinted(container, program, words, name, reason):
    output = container.exec("env", *words, program, name, seconds=90)
    hints = [line for line in output.splitlines() if "slow path" in line]
    need(f"{name}: good" in output and len(hints) == (reason is not None), output)
    if reason:
        need(re.fullmatch(r"freeflow: requests take the slow path: the region at 0x[0-9a-f]+ of \d+ bytes .*", hints[0]), output)
        need(f"({reason}" in hints[0] and "FREEFLOW_HINTS=off" in hints[0], output)


def slow_path_bytes(host):
    return host.status()["counters"]["slow_path_bytes"]


def not_by_the_slow_path(host, program, name):
    """In a container of its own: memory of one that has blocked the worker is reached through the program's own mapping for a while."""
    before, container = slow_path_bytes(host), host.container(name)
    try:
        case(container, program, name)
        grown = slow_path_bytes(host) - before
        need(grown < SLOW_BYTES_MAX, f"{grown} bytes by the slow path")
    finally:
        container.remove()


def from_python(container):
    need("python: good" in container.exec("env", "FREEFLOW_REMAP=eager", "/usr/bin/python3", "-c", PYTHON, seconds=120), "the script did not end well")


def killed_while_moving(host, container, program):
    """A process killed at any moment of a move, its threads held or not, leaves nothing."""
    before = harness.router_resources(host)
    for turn in range(20):
        running = container.start("env", extent_of("writers"), "REMAP_SECONDS=30", program, "writers")
        time.sleep(0.05 + turn * 0.013)
        running.kill()
    container.kill_background()
    harness.wait_for_resources(host, before)


def survives_the_router(container, host, program):
    """Memory that was placed by a router that is gone can be deregistered, and registered with the next one."""
    running = container.start("env", "REMAP_SECONDS=30", program, "router-death")
    running.wait_for_output("placed")
    os.kill(host.router_pid(), 9)
    running.wait_for_output("gone")
    host.up()
    need(running.wait(60) == 0, running.output())


def forks_without_the_router(container, host, program):
    """Partial pages that were shared by a router that is gone are private by the next fork."""
    running = container.start(program, "forks-router-death")
    running.wait_for_output("placed")
    os.kill(host.router_pid(), 9)
    code = running.wait(60)
    host.up()
    need(code == 0 and "forks-router-death: good" in running.output(), running.output())


def case_in_podman(containers, program, name):
    output = harness.run(containers.unprivileged("env", extent_of(name), "REMAP_SECONDS=1", program, name), seconds=90, codes=(0, NOT_HERE))
    if f"{name}: good" not in output:
        return "the container can't see its memory group"
    return "; ".join(line for line in output.splitlines() if ": good" not in line)[:160]


class HugePages:
    """A few huge pages, if the machine has any to give; as before afterwards."""

    def __enter__(self):
        self.before = HUGE_PAGES.read_text()
        try:
            HUGE_PAGES.write_text(str(int(self.before) + 4))
        except OSError:
            pass

    def __exit__(self, *_):
        try:
            HUGE_PAGES.write_text(self.before)
        except OSError:
            pass


@pytest.fixture(scope="module")
def program():
    return harness.program("remap")


@pytest.fixture(scope="module")
def containers():
    with podman.on_own_host() as containers:
        yield containers


@pytest.mark.sampled
@pytest.mark.parametrize("name", WITH_TRAFFIC if WORKERS else ALONE + THREADS + SMALL + EDGES + BESIDE + FORKS + BORROWED)
def test_case(host, container, held, program, name):
    with HugePages() if name in ("kinds", "edges-immovable", "borrowed-not") else contextlib.nullcontext():
        if name in WHOLLY_BORROWED and ATTACHMENT == "local":
            not_by_the_slow_path(host, program, name)
        else:
            case(container, program, name)


@pytest.mark.sampled
@pytest.mark.usual_workers
@pytest.mark.parametrize("name, allocator", itertools.product(("allocator", "fork-threads", "edges-allocator", "edges-forks"), ALLOCATORS))
def test_other_allocators(container, held, program, name, allocator):
    harness.require_commands(ALLOCATORS[allocator])
    preloaded(container, program, name, ALLOCATORS[allocator])


@pytest.mark.sampled
@pytest.mark.usual_workers
@pytest.mark.parametrize("name", ["kinds", "writers", "fork", "shared-again", "edges", "edges-fork", "borrowed", "borrowed-renewed"])
def test_mapping_calls_hooked(container, held, program, name):
    preloaded(container, program, name, harness.program("hooks.so"))


@pytest.mark.usual_workers
def test_traced(container, held, program):
    harness.require_commands("strace")
    case(container, program, "traced", "strace", "-f", "-o", "/dev/null")


@pytest.mark.usual_workers
def test_remapping_is_switched_off(container, held, program):
    refused(container, program)


@pytest.mark.usual_workers
def test_whole_pages_only(container, held, program):
    """FREEFLOW_REMAP=whole leaves memory where it is that holds more than a region."""
    case(container, program, "edges-whole", "env", "FREEFLOW_REMAP=whole")


@pytest.mark.usual_workers
@pytest.mark.parametrize("words, name, reason", [
    ((), "hint", "executable memory"),
    (("FREEFLOW_HINTS=off",), "hint", None),
    ((), "hint-little", None),
    ((), "hint-reused", None),
    ((), "hint-ordinary", None),
    (("FREEFLOW_REMAP=off",), "hint-ordinary", "FREEFLOW_REMAP=off"),
    (("FREEFLOW_REMAP=off", "FREEFLOW_HINTS=off"), "hint-ordinary", None),
    (("FREEFLOW_REMAP=whole",), "hint-partial", "it is not whole pages, with FREEFLOW_REMAP=whole"),
    ((), "hint-partial", None),
    (("strace", "-f", "-o", "/dev/null"), "hint-partial", "its threads can't be stopped"),
])
def test_hint(container, held, program, words, name, reason):
    """A process whose requests go on taking the slow path says so once, with the reason; no other one says anything."""
    harness.require_commands("strace")
    hinted(container, program, words, name, reason)


@pytest.mark.usual_workers
def test_from_python(container, held):
    from_python(container)


@pytest.mark.usual_workers
def test_killed_while_it_moves(host, container, held, program):
    killed_while_moving(host, container, program)


def test_nothing_is_left_in_the_router(host, held):
    harness.wait_for_resources(host, held)


@pytest.mark.usual_workers
def test_router_dies(container, host, held, program):
    survives_the_router(container, host, program)


@pytest.mark.usual_workers
def test_forks_after_the_router_s_death(container, host, held, program):
    forks_without_the_router(container, host, program)


@pytest.mark.usual_workers
@pytest.mark.parametrize("name", ["writers", "charged", "edges", "edges-writers"])
def test_in_podman(containers, program, name):
    """With podman's own seccomp filter, no capability and a memory group: the router holds the threads, not the program."""
    case_in_podman(containers, program, name)


@pytest.mark.usual_workers
@pytest.mark.usual_attachment
def test_borrowed_under_userfaultfd(host, held, program):
    not_by_the_slow_path(host, program, "borrowed-faults")


@pytest.mark.usual_workers
@pytest.mark.usual_attachment
@pytest.mark.parametrize("name", ["borrowed", "borrowed-processes"])
def test_borrowed_in_podman(containers, program, name):
    before = slow_path_bytes(containers.host)
    case_in_podman(containers, program, name)
    grown = slow_path_bytes(containers.host) - before
    need(grown < SLOW_BYTES_MAX, f"{grown} bytes by the slow path")
