"""The part of test_memory_v2.py in the guest: the promises of test_memory.py on cgroup v2.

The guest's memory, files and processes go with it.
"""

import ctypes
import json
import os
import pathlib
import struct
import subprocess

import pytest

import harness
from harness import Host, memory, need

WITHOUT = "FREEFLOW_TEST_WITHOUT_USERFAULTFD"
# Everything is tens of times slower there, and there are 1.5 GiB.
SIZES = memory.Sizes(filled_mib=64, small_mib=16, hoard_most=200, hoard_writers=2)
ROOT = pathlib.Path("/sys/fs/cgroup")
CONTROLLERS = ("memory", "pids")
CALLER = ROOT / "caller"
CALLERS_LIMITS = {"memory.max": str(1 << 30), "pids.max": "4000"}
# The limits and the freezer state of the router's own group.
UNLIMITED = {"memory.max": "max", "memory.high": "max", "memory.swap.max": "max", "memory.oom.group": "0",
             "pids.max": "max", "cgroup.freeze": "0", "cgroup.type": "domain"}

DOCTOR_SECONDS = 120


def refuse_huge_pages():
    """A huge page that the kernel makes of a few small ones counts as memory of the router's, and is no heap that it uses."""
    enabled = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if enabled.exists():
        enabled.write_text("never")


def mount_cgroups():
    harness.run(["mount", "-t", "cgroup2", "none", ROOT])
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
    # It may miss other things in the guest: it says so on the other output.
    doctor = subprocess.run(host.command("doctor", "-o", "json"), capture_output=True, timeout=DOCTOR_SECONDS)
    rights = next(row for row in json.loads(doctor.stdout) if row["name"] == "rights")
    need(rights["verdict"] == "ok", f"doctor: {rights}")
    return f"{path.name} without limits, with {used >> 20} MiB"


def goes_with_the_router(host):
    path = cgroup_of(host.router_pid())
    host.freeflow("down", "--force")
    need(not path.exists(), f"{path} is left")


@pytest.fixture(scope="module")
def cgroups():
    mount_cgroups()
    refuse_huge_pages()
    if os.environ.get(WITHOUT):
        refuse_userfaultfd()
    need(memory.Group.why_not() is None, f"no groups: {memory.Group.why_not()}")


@pytest.fixture(scope="module")
def host(cgroups):
    # A spinning worker would take one of the guest's two processors.
    with Host("--mode", "lowcpu", "--workers", "1") as host:
        host.freeflow("network", "set", "default", "--data-path", "routed")
        yield host


def test_router_has_its_own_cgroup(host):
    own_cgroup(host)


def test_all_that_limits_allow(host, container):
    memory.hoarded(host, container, harness.program("hoard"), SIZES)


def test_container_pays_for_its_memory(host, container):
    memory.within_its_limit(host, container, harness.program("memory"), "fill", SIZES)


def test_container_pays_for_what_it_registers(host, container):
    memory.within_its_limit(host, container, harness.program("memory"), "move", SIZES)


def test_container_meets_its_own_limit(host, container):
    memory.beyond_its_limit(host, container, host.container("b"), harness.program("memory"), SIZES)


def test_cgroup_goes_with_the_router(host):
    goes_with_the_router(host)
