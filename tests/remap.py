#!/usr/bin/env python3
"""Re-mapping of registered memory: what is zero-copy, that nothing is lost while it changes, that nothing is left.

The cases are of tests/c/remap.c; here they run in containers, with other allocators, under a tracer, without the
router's help, and from Python's and Java's heaps.
"""

import os
import pathlib
import re
import shutil
import tempfile
import time

import commands
import lib
from lib import need

SECONDS = "20" if lib.FULL else "2"
COUNT = "100000" if lib.FULL else "20000"
ROUNDS = "200" if lib.FULL else "12"
LIBRARIES = pathlib.Path("/usr/lib/x86_64-linux-gnu")
ALLOCATORS = {"jemalloc": LIBRARIES / "libjemalloc.so.2", "tcmalloc": LIBRARIES / "libtcmalloc_minimal.so.4"}
HUGE_PAGES = pathlib.Path("/proc/sys/vm/nr_hugepages")
NOT_HERE = 77  # what a case ends with that needs something of the machine
ALONE = ("kinds", "data", "overlap", "rereg", "resident", "stale", "fork", "limit", "many",
         "renewed", "renewed-heap", "renewed-small", "renewed-on-demand", "renewed-moved",
         "renewed-atomics")
THREADS = ("writers", "signals", "reads", "calls", "atomics", "allocator", "fork-threads", "shared-again")

# Those in which bytes are moved: with several workers only they are run again.
WITH_TRAFFIC = ("data", "overlap", "rereg", "renewed", "renewed-on-demand", "renewed-atomics", "fork", "reads", "calls", "atomics", "fork-threads")

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


def case(container, program, name, *words):
    settings = [f"REMAP_SECONDS={SECONDS}", f"REMAP_COUNT={COUNT}", f"REMAP_ROUNDS={ROUNDS}"]
    output = container.exec("env", *settings, *words, program, name, seconds=240)
    need(f"{name}: good" in output, output)
    return "; ".join(line for line in output.splitlines() if ": good" not in line)[:160]


def preloaded(container, program, name, library):
    return case(container, program, name, "env", f"LD_PRELOAD={library}")


def refused(container, program):
    """FREEFLOW_REMAP=off leaves all memory where it is."""
    output = container.exec("env", "FREEFLOW_REMAP=off", program, "kinds", codes=(1,))
    need(re.search(r"pages: 0 bytes are placed", output), output)


def from_python(container):
    need("python: good" in container.exec("/usr/bin/python3", "-c", PYTHON, seconds=120), "the script did not end well")


def killed_while_moving(host, container, program):
    """A process killed at any moment of a move, its threads held or not, leaves nothing."""
    before = lib.router_resources(host)
    for turn in range(20):
        running = container.start("env", "REMAP_SECONDS=30", program, "writers")
        time.sleep(0.05 + turn * 0.013)
        running.kill()
    container.kill_background()
    lib.wait_for_resources(host, before)


def survives_the_router(container, host, program):
    """Memory that was placed by a router that is gone can be deregistered, and registered with the next one."""
    running = container.start("env", "REMAP_SECONDS=30", program, "router-death")
    running.wait_for_output("placed")
    os.kill(host.router_pid(), 9)
    running.wait_for_output("gone")
    host.up()
    need(running.wait(60) == 0, running.output())


def in_podman(checks, program):
    """With podman's own seccomp filter, no capability and a memory group: the router holds the threads, not the program."""
    if not shutil.which("podman") or not shutil.which("runc"):
        checks.skip("podman", "podman and runc are not installed")
        return
    cdi = tempfile.mkdtemp(prefix="freeflow-test-cdi.")
    try:
        with lib.Host("--cdi-dir", cdi) as host:
            shutil.copytree(cdi, host.directory / "cdi")
            containers = commands.Podman(host)
            try:
                checks.check("podman: writers", case_in_podman, containers, program, "writers")
                checks.check("podman: charged to the container", case_in_podman, containers, program, "charged")
            finally:
                containers.close()
    finally:
        shutil.rmtree(cdi, ignore_errors=True)


def case_in_podman(containers, program, name):
    output = lib.run(containers.unprivileged("env", "REMAP_SECONDS=1", program, name), seconds=90, codes=(0, NOT_HERE))
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


def test(checks):
    program = lib.program("remap")
    with lib.Host() as host:
        container = host.container("one")
        empty = lib.router_resources(host)
        if lib.WORKERS:
            for name in WITH_TRAFFIC:
                checks.check(name, case, container, program, name)
            checks.check("nothing is left in the router", lib.wait_for_resources, host, empty)
            return
        with HugePages():
            checks.check("kinds", case, container, program, "kinds")
        for name in ALONE[1:] + THREADS:
            checks.check(name, case, container, program, name)
        for name, library in ALLOCATORS.items():
            if library.exists():
                checks.check(f"allocator {name}", preloaded, container, program, "allocator", library)
                checks.check(f"forks with {name}", preloaded, container, program, "fork-threads", library)
            else:
                checks.skip(f"allocator {name}", f"{library} is not installed")
        for name in ("kinds", "writers", "fork", "shared-again"):
            checks.check(f"{name}, mapping calls hooked", preloaded, container, program, name, lib.program("hooks.so"))
        if shutil.which("strace"):
            checks.check("traced", case, container, program, "traced", "strace", "-f", "-o", "/dev/null")
        else:
            checks.skip("traced", "strace is not installed")
        checks.check("FREEFLOW_REMAP=off", refused, container, program)
        checks.check("python", from_python, container)
        checks.check("killed while it moves", killed_while_moving, host, container, program)
        checks.check("nothing is left in the router", lib.wait_for_resources, host, empty)
        checks.check("router-death", survives_the_router, container, host, program)
    in_podman(checks, program)


if __name__ == "__main__":
    lib.main(test)
