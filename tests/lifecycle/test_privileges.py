"""The router's rights: what each of its threads has, what it has of its caller's; also after a restart."""

import ctypes
import errno
import json
import os
import pathlib
import platform
import re
import select
import signal
import time

import pytest

import harness
from harness import PORT, Host, Lab, need
from harness.settings import ROOT, DIST

pytestmark = pytest.mark.usual_attachment

SYS_RESOURCE = 24
# linux/capability.h; those that the lists name.
NUMBERS = {"CAP_DAC_OVERRIDE": 1, "CAP_FOWNER": 3, "CAP_NET_BIND_SERVICE": 10, "CAP_NET_ADMIN": 12, "CAP_NET_RAW": 13, "CAP_SYS_PTRACE": 19,
           "CAP_SYS_RESOURCE": 24, "CAP_CHECKPOINT_RESTORE": 40}
RECONCILER = {"CAP_NET_ADMIN", "CAP_NET_RAW", "CAP_DAC_OVERRIDE"}
UNIT = ROOT / "packaging" / "systemd" / "freeflow.service"
ALWAYS = {"freeflow-router", "ff-api", "ff-audit", "ff-control", "ff-networks", "ff-sysfs", "ff-worker"}


# Two filters of the process' start, one or two of the thread's kind, and one of each kind that began it, but for the router's main thread.
FILTER_COUNTS = {False: {0}, True: {3, 4, 5, 6}}
NEVER = {"bpf", "execve", "execveat", "init_module", "io_uring_setup", "keyctl", "kill", "mount", "open_by_handle_at", "perf_event_open",
         "process_vm_readv", "process_vm_writev", "setns", "unshare"}


def described():
    return json.loads(harness.run([DIST / "bin" / "freeflow-router", "--privileges"]))


def status_of(path):
    fields = dict(line.split(":", 1) for line in (path / "status").read_text().splitlines())
    return {key: value.strip() for key, value in fields.items()}


def mask(names, own):
    """Those of the capabilities that we have ourselves to give."""
    return sum(1 << NUMBERS[name] for name in names) & own


def threads(pid):
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        try:
            yield status_of(task)
        except OSError:  # it has ended
            continue


def filter_count(status):
    """Linux 5.9 and newer say it."""
    return int(status.get("Seccomp_filters", 0))


def each_thread(host, wanted=frozenset(ALWAYS), pid=None, without=frozenset()):
    """Of the router, or of another process of its program; `without` are capabilities that the whole process lacks."""
    table = described()["threads"]
    own = int(status_of(pathlib.Path("/proc/self"))["CapBnd"], 16) & ~mask(without, -1)
    seen = set()
    for status in threads(pid or host.router_pid()):
        kind = re.sub(r"-\d+$", "", status["Name"])
        need(kind in table, f"the thread {status['Name']} has no line in crates/router/src/base/privileges.rs")
        seen.add(kind)
        effective = mask(table[kind]["capabilities"], own)
        permitted = effective | mask(table[kind]["hands_on"], own)
        for field, value in (("CapPrm", permitted), ("CapEff", effective), ("CapBnd", 0), ("CapInh", 0), ("CapAmb", 0)):
            need(int(status[field], 16) == value, f"{status['Name']}: {field} is {status[field]}, not {value:x}")
        need(status["NoNewPrivs"] == "1", f"{status['Name']} may gain privileges")
        filters = filter_count(status) - filter_count(status_of(pathlib.Path("/proc/self")))
        need(status["Seccomp"] == "2" and filters in FILTER_COUNTS["Seccomp_filters" in status],
             f"{status['Name']} has {filters} filters of its system calls")
    need(wanted <= seen, f"no thread is called {wanted - seen}")
    return f"{len(seen)} kinds"


def some_that_come_and_go(host):
    """Threads that only some work begins: memory that is not shared, pages that move, a capture."""
    server, client = host.pair()
    load = harness.program("load")
    there = server.start(load, "-f", "server", PORT)
    server.wait_for_port(there)
    here = client.start(load, "-f", "client", server.ip, PORT)
    for program in (there, here):
        program.wait_for_output("ready")
    note = each_thread(host)
    server.remove()
    client.remove()
    return note


def surroundings(host):
    pid = host.router_pid()
    proc = pathlib.Path(f"/proc/{pid}")
    names = {entry.split("=", 1)[0] for entry in (proc / "environ").read_bytes().decode().split("\0") if entry}
    need(names <= {"PATH", "FREEFLOW_LIBDIR"}, f"its environment has {names}")
    need(os.readlink(proc / "cwd") == "/", "its directory is its caller's")
    need(os.getsid(pid) != os.getsid(0) and status_of(proc)["Umask"] == "0022", "its session or umask is its caller's")
    adjustment = int((proc / "oom_score_adj").read_text())
    may_lower = int(status_of(pathlib.Path("/proc/self"))["CapEff"], 16) >> SYS_RESOURCE & 1
    before = int(pathlib.Path("/proc/self/oom_score_adj").read_text())
    need(adjustment == (-900 if may_lower else before), f"its oom_score_adj is {adjustment}")
    need(may_lower or "keeps its oom_score_adj" in (host.run_dir / "router.log").read_text(), "that is not in its log")
    opened = {os.readlink(link) for link in (proc / "fd").iterdir()}
    need(not any(name.startswith(str(host.directory)) and not name.startswith(str(host.run_dir)) for name in opened),
         f"it has kept a descriptor: {opened}")
    for child in harness.children(pid):
        need(int(pathlib.Path(f"/proc/{child}/oom_score_adj").read_text()) == max(before, 0), "its child is spared, too")


def network_reconciler(host):
    """The one child: it has what changing interfaces takes, and the host follows by it."""
    found = harness.children(host.router_pid())
    need(len(found) == 1, f"the router's children are {found}")
    status = status_of(pathlib.Path(f"/proc/{found.pop()}"))
    own = int(status_of(pathlib.Path("/proc/self"))["CapBnd"], 16)
    for field in ("CapPrm", "CapEff", "CapBnd"):
        need(int(status[field], 16) == mask(RECONCILER, own), f"{field} is {status[field]}")
    need(status["NoNewPrivs"] == "1", "a program that it executes may gain privileges")
    need(status["Seccomp"] == status_of(pathlib.Path("/proc/self"))["Seccomp"], "it has a filter: it executes iptables")


def only_near_halves(host):
    found = harness.near_halves_of(host)
    need(len(found) == 1, f"processes of near halves: {found}")
    return found[0]


def near_halves(host):
    """That process has the right to look at others, and the router does without; it ends with the router."""
    server, client = host.pair()
    load = harness.program("load")
    there = server.start("env", "FREEFLOW_REMAP=off", load, "server", PORT)
    server.wait_for_port(there)
    here = client.start("env", "FREEFLOW_REMAP=off", load, "client", server.ip, PORT)
    for program in (there, here):
        program.wait_for_output("ready")
    near = only_near_halves(host)
    each_thread(host, frozenset(ALWAYS | {"ff-attachment"}), without={"CAP_SYS_PTRACE", "CAP_CHECKPOINT_RESTORE"})
    each_thread(host, {"ff-near-halves", "ff-near", "ff-slow-path"}, pid=near)
    server.remove()
    client.remove()
    pidfd = os.pidfd_open(near)
    harness.end_router(host)
    need(select.select([pidfd], [], [], 20)[0], "its near halves outlive it")
    os.close(pidfd)
    host.up()


def near_halves_die(host):
    """Without them vNICs fail, and who connects is refused; the router goes on."""
    container, once = host.container("one"), harness.program("stalls")
    container.exec(once, "once")
    idle = container.start(once, "idle")
    idle.wait_for_output("in force")
    os.kill(only_near_halves(host), signal.SIGKILL)
    end = time.monotonic() + 20
    while "its near half has ended" not in host.router_log():
        need(time.monotonic() < end, "no line of the log says so")
        time.sleep(0.005)
    container.exec(once, "once", codes=range(1, 256))
    need("connection refused" in host.router_log(), "that is not in its log")
    need(any(row["name"] == "one" for row in host.containers()) and host.is_up(), "the router does not go on")
    harness.end_router(host, signal.SIGTERM)
    host.up()
    container.exec(once, "once")


def all_of_it(host):
    each_thread(host)
    surroundings(host)
    network_reconciler(host)


def after_a_kill(host):
    reconciler = harness.children(host.router_pid()).pop()
    pidfd = os.pidfd_open(reconciler)
    harness.end_router(host)
    need(select.select([pidfd], [], [], 20)[0], "its network reconciler outlives it")
    os.close(pidfd)
    host.up()
    all_of_it(host)


def cgroups_of(pid):
    rows = (line.split(":", 2) for line in pathlib.Path(f"/proc/{pid}/cgroup").read_text().splitlines())
    return {controllers or "unified": path for _, controllers, path in rows}


def cgroup_mount(name):
    for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines():
        before, after = line.split(" - ", 1)
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2" if name == "unified" else kind == "cgroup" and name in options.split(","):
            return pathlib.Path(before.split(" ")[4])
    return None


class CallersCgroup:
    """A cgroup that `freeflow up` is called from, in the hierarchies that we may write and are not kept in."""

    def __enter__(self):
        kept = os.environ["FREEFLOW_CGROUP_KEEP"].split(",")
        self.directories = []
        for name in ("freezer", "pids", "unified"):
            mount = cgroup_mount(name)
            if mount and name not in kept and "all" not in kept:
                directory = mount / f"caller-{os.getpid()}"
                directory.mkdir()
                self.directories.append((name, directory))
        return self

    def __exit__(self, *_):
        for _, directory in self.directories:
            directory.rmdir()

    def run(self, command):
        entering = " ".join(f"echo 0 > {directory}/cgroup.procs &&" for _, directory in self.directories)
        harness.run(["sh", "-c", f'{entering} exec "$@"', "sh", *command])


def own_name(host):
    hash_ = 0xcbf29ce484222325
    for byte in str(host.run_dir).encode():
        hash_ = (hash_ ^ byte) * 0x100000001b3 & 0xffffffffffffffff
    return f"freeflow-{hash_ & 0xffffffff:08x}"


def has_left(host, caller):
    now = cgroups_of(host.router_pid())
    for name, directory in caller.directories:
        row = next(path for controllers, path in now.items() if name in controllers.split(","))
        need(row == f"/{own_name(host)}", f"{name}: the router is in {row}")
        need(not (directory / "cgroup.procs").read_text(), f"somebody is left in {directory}")
    return ", ".join(name for name, _ in caller.directories)


def is_removed(host):
    left = [path for path in pathlib.Path("/sys/fs/cgroup").glob(f"**/{own_name(host)}")]
    need(not left, f"left: {left}")


def unit():
    """The unit file gives what the command and the router need to start, which is what the code says."""
    settings = dict(line.split("=", 1) for line in UNIT.read_text().splitlines() if "=" in line and line[0] != "#")
    table = described()
    need(set(settings["CapabilityBoundingSet"].split()) == set(table["unit"]["capabilities"]),
         f"the unit has {settings['CapabilityBoundingSet']}, the code {table['unit']['capabilities']}")
    need(set(table["start"]["capabilities"]) <= set(table["unit"]["capabilities"]), "the router lacks some there")
    need(settings["NoNewPrivileges"] == "yes", "the unit lets programs gain privileges")


def doctor(host):
    rows = json.loads(host.freeflow("doctor", "-o", "json"))
    detail = next(row["detail"] for row in rows if row["name"] == "rights")
    count = len(list(threads(host.router_pid())))
    need(f"all {count} threads of the router are confined" in detail and "system calls are filtered" in detail, detail)


def lists():
    """A call that no router makes is on no list, and threads that parse input of others have the short ones."""
    table = described()
    threads_of_strangers = [set(table["threads"][kind]["calls"]) for kind in ("ff-worker", "ff-api", "ff-peers", "ff-copy")]
    for name, row in [("start", table["start"]), *table["threads"].items()]:
        found = NEVER & set(row["calls"])
        need(not found, f"{name} may call {found}")
    for calls in threads_of_strangers:
        need("ptrace" not in calls and len(calls) < len(table["start"]["calls"]), f"a list of a thread: {calls}")


# sys/ptrace.h, sys/wait.h, x86-64's unistd.h.
SEIZE, INTERRUPT, CONTINUE, SYSCALL, DETACH, GET_REGISTERS, SET_REGISTERS = 0x4206, 0x4207, 7, 24, 17, 12, 13
ANY_THREAD = 0x40000000
GETPPID = 110


class Registers(ctypes.Structure):
    """sys/user.h: user_regs_struct."""

    _fields_ = [(name, ctypes.c_long) for name in (
        "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss fs_base gs_base ds es fs gs").split()]


def ptrace(request, thread, data=0):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    data = ctypes.addressof(data) if isinstance(data, Registers) else data
    if libc.ptrace(request, thread, None, data) == -1:
        raise OSError(ctypes.get_errno(), f"ptrace {request}")


def registers_of(thread):
    registers = Registers()
    ptrace(GET_REGISTERS, thread, registers)
    return registers


def wait_for_stop(thread):
    _, status = os.waitpid(thread, ANY_THREAD)
    need(os.WIFSTOPPED(status), "the thread has ended")
    return os.WSTOPSIG(status)


def have_call_made(thread, number, seconds=20):
    """Has a thread make another call, without arguments, than the one that it sleeps in, and sleep on. The answer."""
    end = time.monotonic() + seconds
    ptrace(SEIZE, thread)
    try:
        while True:
            ptrace(INTERRUPT, thread)
            wait_for_stop(thread)
            before = registers_of(thread)
            if before.orig_rax >= 0:
                break
            need(time.monotonic() < end, "the thread does not sleep in a call")
            ptrace(CONTINUE, thread)
            time.sleep(0.005)
        changed = Registers.from_buffer_copy(before)
        changed.rax, changed.orig_rax, changed.rip = number, -1, before.rip - 2
        ptrace(SET_REGISTERS, thread, changed)
        # The call and its end; then, if it is refused, the handler's calls up to its return.
        passed_on, is_handled = 0, False
        for stop in range(20):
            ptrace(SYSCALL, thread, passed_on)
            signalled = wait_for_stop(thread)
            passed_on = signalled if signalled == signal.SIGSYS else 0
            is_handled = is_handled or signalled == signal.SIGSYS
            now = registers_of(thread)
            if stop >= 1 and not passed_on and now.rip == before.rip and (is_handled or now.rax != number):
                break
        # To the program it is as if a signal had come.
        before.rax, before.orig_rax = -errno.EINTR, -1
        ptrace(SET_REGISTERS, thread, before)
        return now.rax
    finally:
        ptrace(DETACH, thread)


def refused(host):
    """A call that is not on the list of a thread: answers EPERM, is a line of the log, once, and ends nothing."""
    pid = host.router_pid()
    tasks = pathlib.Path(f"/proc/{pid}/task").iterdir()
    thread = next(int(task.name) for task in tasks if (task / "comm").read_text().strip() == "ff-sysfs")
    log = host.run_dir / "router.log"
    for _ in range(2):
        answer = have_call_made(thread, GETPPID)
        need(answer == -errno.EPERM, f"getppid answers {answer}")
    end = time.monotonic() + 20
    while "a system call was refused" not in log.read_text():
        need(time.monotonic() < end, "no line of the log says so")
        time.sleep(0.005)
    host.container("after")
    lines = [line for line in log.read_text().splitlines() if "a system call was refused" in line]
    need(len(lines) == 1 and f"thread=ff-sysfs call={GETPPID} " in lines[0], f"the log says {lines}")
    need(host.router_pid() == pid and host.is_up(), "it ended")


def test_unit_file_says_what_the_code_says():
    unit()


def test_lists_of_system_calls():
    lists()


@pytest.mark.parametrize("promise", [each_thread, surroundings, network_reconciler, doctor, some_that_come_and_go, after_a_kill])
def test_router(host, promise):
    promise(host)


def test_threads_that_copy():
    with Host("--workers", "2") as host:
        each_thread(host, frozenset(ALWAYS | {"ff-copy"}))


def test_near_halves():
    with Host("--attachment", "remote") as host:
        near_halves(host)


def test_near_halves_that_die():
    with Host("--attachment", "remote") as host:
        near_halves_die(host)


def test_threads_with_peers():
    with Lab() as lab:
        each_thread(lab.host(1), frozenset(ALWAYS | {"ff-peers"}))


def test_cgroup_of_its_own_that_goes_with_it(check):
    with CallersCgroup() as caller:
        if not caller.directories:
            harness.skip_lacking("a cgroup hierarchy that can be written")
        with Host() as host:
            host.freeflow("down", "--force")
            caller.run(host.command("up"))
            check("a cgroup of its own", has_left, host, caller)
            host.freeflow("down", "--force")
            check("which goes with it", is_removed, host)


def test_refused_system_call_is_logged():
    if platform.machine() != "x86_64":
        harness.skip_lacking("the registers of x86-64")
    with Host() as host:
        refused(host)
    # This one is meant.
    meant = f"=ff-sysfs call={GETPPID} "
    harness.RunDirectory.refused_calls -= {line for line in harness.RunDirectory.refused_calls if meant in line}
