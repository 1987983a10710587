#!/usr/bin/env python3
"""The promises of tests/memory.py on cgroup v2, and the router's own cgroup there, in an emulated guest.

    tests/memory_v2.py [--without-userfaultfd]

This machine may have cgroup v1 only; the guest of scripts/rxe-guest has what its command mounts. `freeflow up` is
called from a cgroup with limits, as from a session. With --without-userfaultfd the router gets no userfaultfd, so that
pages are charged to it: then the checks of who pays have to fail, which shows that they would.

The guest's memory, files and processes go with it. What runs out here is scripts/rxe-guest in place of this program, so
nothing stays behind however that ends.
"""

import ctypes
import json
import os
import pathlib
import struct
import subprocess
import sys

import lib
import memory
import rxe_guest
from lib import need

INSIDE = "FREEFLOW_TEST_MEMORY_V2"  # set in the guest
WITHOUT = "--without-userfaultfd"
SECONDS, DOCTOR_SECONDS = 800, 120
# Everything is tens of times slower there, and there are 1.5 GiB.
SIZES = memory.Sizes(filled_mib=64, small_mib=16, hoard_most=200, hoard_writers=2)
ROOT = pathlib.Path("/sys/fs/cgroup")
CONTROLLERS = ("memory", "pids")
CALLER = ROOT / "caller"
CALLERS_LIMITS = {"memory.max": str(1 << 30), "pids.max": "4000"}
# The limits and the freezer state of the router's own group.
UNLIMITED = {"memory.max": "max", "memory.high": "max", "memory.swap.max": "max", "memory.oom.group": "0",
             "pids.max": "max", "cgroup.freeze": "0", "cgroup.type": "domain"}


def enter_guest():
    """Does what needs this machine, and goes on in the guest in place of this program."""
    lib.require_root()
    lib.program("memory")
    settings = {"FREEFLOW_DIST": lib.DIST.resolve(), "CARGO_TARGET_DIR": lib.TARGET.resolve(), INSIDE: "1"}
    environment = [f"{name}={value}" for name, value in settings.items()]
    guest = [rxe_guest.SCRIPT, "--packages", "--seconds", SECONDS]
    command = [*guest, "--", "env", *environment, "python3", __file__, *sys.argv[1:]]
    os.execv(command[0], [str(word) for word in command])


# ---- in the guest


def mount_cgroups():
    lib.run(["mount", "-t", "cgroup2", "none", ROOT])
    (ROOT / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in CONTROLLERS))
    CALLER.mkdir()
    for name, value in CALLERS_LIMITS.items():
        (CALLER / name).write_text(value)
    (CALLER / "cgroup.procs").write_text("0")


def refuse_userfaultfd():
    """For this process and all that it starts: EPERM, by a filter of system calls."""
    set_no_new_privs, set_seccomp, filter_mode = 38, 22, 2
    userfaultfd, load, equal, give = 323, 0x20, 0x15, 0x06
    code = [(load, 0, 0, 0), (equal, 0, 1, userfaultfd), (give, 0, 0, 0x50001), (give, 0, 0, 0x7fff0000)]
    text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code), ctypes.addressof(text)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for words in ((set_no_new_privs, 1, 0, 0, 0), (set_seccomp, filter_mode, program, 0, 0)):
        need(prctl(*words) == 0, f"prctl: {os.strerror(ctypes.get_errno())}")


def cgroup_of(pid):
    lines = pathlib.Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    need(len(lines) == 1 and lines[0].startswith("0::/"), f"not one hierarchy: {lines}")
    return ROOT / lines[0].removeprefix("0::/")


def parent_of(pid):
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def own_cgroup(host):
    """The router has left its caller's cgroup, has one without limits, and shares it with nobody but its helper."""
    pid = host.router_pid()
    need(cgroup_of(os.getpid()) == CALLER, f"the test is in {cgroup_of(os.getpid())}")
    path = cgroup_of(pid)
    need(path.parent == ROOT and path.name.startswith("freeflow-"), f"the router is in {path}")
    state = {name: (path / name).read_text().strip() for name in UNLIMITED if (path / name).exists()}
    wrong = {name: value for name, value in state.items() if value != UNLIMITED[name]}
    need(not wrong and "memory.max" in state, f"{path}: {wrong or state}")
    processes = {int(word) for word in (path / "cgroup.procs").read_text().split()}
    others = {process for process in processes - {pid} if parent_of(process) != pid}
    need(pid in processes and not others, f"{path} has {processes}, the router is {pid}")
    used = int((path / "memory.current").read_text())
    need(used, f"nothing is charged to {path}")
    # Whatever else it may miss in the guest: it says so on the other output.
    doctor = subprocess.run(host.command("doctor", "-o", "json"), capture_output=True, timeout=DOCTOR_SECONDS)
    rights = next(row for row in json.loads(doctor.stdout) if row["name"] == "rights")
    need(rights["verdict"] == "ok", f"doctor: {rights}")
    return f"{path.name} without limits, with {used >> 20} MiB"


def goes_with_the_router(host):
    path = cgroup_of(host.router_pid())
    host.freeflow("down", "--force")
    need(not path.exists(), f"{path} is left")


def test(checks):
    mount_cgroups()
    if WITHOUT in sys.argv:
        refuse_userfaultfd()
    need(memory.Group.why_not() is None, f"no groups: {memory.Group.why_not()}")
    # A spinning worker would take one of the guest's two processors.
    with lib.Host("--mode", "lowcpu", "--workers", "1") as host:
        host.freeflow("network", "set", "default", "--data-path", "routed")
        checks.check("cgroup v2: the router has its own", own_cgroup, host)
        memory.on_cgroups(checks, host, host.container("a"), SIZES)
        checks.check("cgroup v2: it goes with the router", goes_with_the_router, host)


if __name__ == "__main__":
    if INSIDE in os.environ:
        lib.main(test)
    else:
        enter_guest()
