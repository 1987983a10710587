"""No tenant holds up the router's control thread or its worker, whatever it does with its own processes and its cgroup.

Shown by the cause, not by a time: while a trick is in force both threads are traced, and not one of their system calls may name a
process' directory in /proc, or stop there; and a victim in another container goes on getting answers.
"""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time

import pytest

import harness
from harness import PORT, Host, need
from harness.settings import FULL

# They look at the router's own threads.
pytestmark = pytest.mark.usual_attachment

SECONDS = 10 if FULL else 2
NOT_HERE = 77
# Of `ff-identify`, for each vNIC; connections that wait for them (crates/router/src/attachment/identify.rs).
IDENTIFIER_COUNT_MAX = 4
WAITING_COUNT_MAX = 64
HALVES_OF_VNIC_MAX = 4  # crates/router/src/attachment/near_halves.rs
CONNECTS = 300  # more than both, fewer than one process has descriptors
# From a process' last word to its call, on a machine with other work. Nobody can look: its files in /proc wait as it does.
EXECVE_SECONDS = 0.3
FREEZER = pathlib.Path("/sys/fs/cgroup/freezer")
# strace -y shows the path of a descriptor too. The router's own directory is looked at by nobody but the router.
TENANT_OBJECT = re.compile(r"/proc/\d+")


def threads_of(pid):
    """Names of a process' threads, by ID."""
    names = {}
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            names[int(task.name)] = (task / "comm").read_text().strip()
    return names


def until(condition, what, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        need(time.monotonic() < end, what)
        time.sleep(0.01)


class Trace:
    """The system calls of the control thread and of the worker."""

    def __init__(self, pid):
        # A thread that has just begun has the name of the one that began it: the oldest of a name is meant.
        ids = {name: task for task, name in sorted(threads_of(pid).items(), reverse=True) if name in ("ff-control", "ff-worker")}
        need(len(ids) == 2, f"the router's threads: {threads_of(pid)}")
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="freeflow-stalls."))
        self.pid, self.running = pid, []
        for name, task in ids.items():
            command = ["strace", "-y", "-s", "0", "-p", str(task), "-o", str(self.directory / name)]
            self.running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        tracers = [pathlib.Path(f"/proc/{pid}/task/{task}/status") for task in ids.values()]
        until(lambda: all("TracerPid:\t0\n" not in path.read_text() for path in tracers), "strace does not attach")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for running in self.running:
            running.terminate()
        for running in self.running:
            running.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def check(self):
        """How many calls were seen."""
        count = 0
        for path in sorted(self.directory.iterdir()):
            lines = path.read_text(errors="replace").splitlines()
            bad = [line for line in lines if TENANT_OBJECT.search(line.replace(f"/proc/{self.pid}/", "/"))]
            need(not bad, f"{path.name} touched a tenant's process:\n" + "\n".join(bad[:5]))
            count += len(lines)
        return count


class Stage:
    def __init__(self, host):
        self.host, self.program = host, harness.program("stalls")
        self.enemy, self.bystander = self.container("enemy"), host.container("victim")
        self.victim = self.bystander.start(self.program, "victim")
        self.victim.wait_for_output("ready")

    def container(self, name):
        """A container gets /dev/fuse only where its owner says so."""
        return self.host.container(name, *(["-v", "/dev/fuse:/dev/fuse"] if os.path.exists("/dev/fuse") else []))

    def is_answered(self, seconds=20):
        """The victim's verbs, and new sessions beside it."""
        before = self.victim.output().count(".")
        until(lambda: self.victim.output().count(".") >= before + 5 or self.victim.process.poll() is not None,
              "the victim's control verbs are not answered", seconds)
        need(self.victim.process.poll() is None, f"the victim failed:\n{self.victim.output()}")
        self.bystander.exec(self.program, "once", seconds=seconds)

    def identifiers(self):
        return [task for task, name in threads_of(self.host.router_pid()).items() if name == "ff-identify"]

    def are_stuck(self, count):
        """So many of the router's threads wait in `open`."""
        calls = []
        for task in threads_of(self.host.router_pid()):
            with contextlib.suppress(OSError):
                calls.append(pathlib.Path(f"/proc/{self.host.router_pid()}/task/{task}/syscall").read_text().split()[0])
        return calls.count("257") >= count  # openat on x86-64

    def is_in_force(self, running):
        """False: it can't be done here. (`Running.wait` looks at processes that nobody can look at now.)"""
        until(lambda: "in force" in running.output() or running.process.poll() is not None, "the trick does not begin")
        code = running.process.poll()
        need(code in (None, NOT_HERE), f"exit code {code}:\n{running.output()}")
        return code is None

    def start(self, *words):
        """The trick, and whether it is in force. Of `fuse` the router sees nothing before a process is in `execve`."""
        pid = self.host.router_pid()
        if words[0] == "fuse":
            os.kill(pid, signal.SIGSTOP)
        try:
            running = self.enemy.start(self.program, *words)
            is_in_force = self.is_in_force(running)
            if words[0] == "fuse" and is_in_force:
                time.sleep(EXECVE_SECONDS)
            return running, is_in_force
        finally:
            os.kill(pid, signal.SIGCONT)

    def trick(self, *words, in_force=None, codes=(0, -signal.SIGTERM, 143)):
        """A trick of the enemy, and what is asserted meanwhile."""
        with Trace(self.host.router_pid()) as trace:
            running, is_in_force = self.start(*words)
            try:
                if not is_in_force:
                    return running.output().strip()
                note = in_force(running) if in_force else ""
                end = time.monotonic() + SECONDS
                while True:
                    self.is_answered()
                    if time.monotonic() >= end:
                        break
                count = trace.check()
            finally:
                lift(running)
            need(count > 0, "nothing was traced")
            running.process.wait(60)
            need(running.process.returncode in codes, f"exit code {running.process.returncode}:\n{running.output()}")
        return f"{count} calls traced{note or ''}"

    def stuck(self, connects):
        threads, descriptors = min(connects, IDENTIFIER_COUNT_MAX), self.descriptors()

        def in_force(_):
            until(lambda: self.are_stuck(threads), "nobody is stuck: the trick is not in force")
            need(len(self.identifiers()) <= 2 * IDENTIFIER_COUNT_MAX, f"{len(self.identifiers())} threads look at who connects")
            # A socket and a pidfd each.
            until(lambda: self.descriptors() <= descriptors + 2 * WAITING_COUNT_MAX + 32,
                  f"{self.descriptors()} descriptors, before it {descriptors}")
            return f", {len(self.identifiers())} threads stuck"

        note = self.trick("fuse", connects, in_force=in_force)
        self.enemy.exec(self.program, "once", seconds=30)
        return note

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.host.router_pid()}/fd"))

    def stopped(self):
        def stop(running):
            self.victims_of(running, signal.SIGSTOP)

        return self.trick("idle", in_force=stop)

    def fuse_file(self):
        """The router does not map a file whose page faults are a daemon's, and waits for none."""
        def in_force(running):
            until(lambda: running.output().count("refused") >= 3, "a FUSE file is not refused")
            need("memory is borrowed" in running.output(), "nothing is borrowed at all")

        return self.trick("borrow", in_force=in_force)

    def victims_of(self, running, number):
        for pid in harness.descendants(running.process.pid):
            if "stalls" in pathlib.Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, number)

    def frozen(self, *words):
        """The whole container, in version 1's freezer."""
        if not (FREEZER / "cgroup.procs").exists():
            return "no freezer here"
        group = FREEZER / f"freeflow-stalls-{os.getpid()}"
        group.mkdir()

        def freeze(running):
            for pid in harness.descendants(running.process.pid):
                (group / "cgroup.procs").write_text(str(pid))
            (group / "freezer.state").write_text("FROZEN")
            until(lambda: (group / "freezer.state").read_text().strip() == "FROZEN", "it does not freeze")

        try:
            return self.trick(*words, in_force=freeze)
        finally:
            (group / "freezer.state").write_text("THAWED")
            until(lambda: not (group / "cgroup.procs").read_text().split(), "processes stay in the cgroup")
            group.rmdir()

    def bad_memory(self, kind):
        program = harness.program("bad_memory")
        with Trace(self.host.router_pid()) as trace:
            owner = self.enemy.start("env", "FREEFLOW_REMAP=off", program, kind, "server", PORT)
            self.enemy.wait_for_port(owner)
            user = self.enemy.start(program, kind, "client", self.enemy.ip, PORT)
            while user.process.poll() is None:
                self.is_answered()
            need(user.wait(60) in (0, NOT_HERE) and owner.wait(60) in (0, NOT_HERE), owner.output() + user.output())
            return f"{trace.check()} calls traced"

    def vnic_goes(self):
        """The container is removed while the threads that look at its process are stuck."""
        running, is_in_force = self.start("fuse", CONNECTS)
        if not is_in_force:
            return running.output().strip()
        until(lambda: self.are_stuck(IDENTIFIER_COUNT_MAX), "nobody is stuck")
        self.enemy.remove()
        self.is_answered()
        until(lambda: not self.are_stuck(1), "threads of a vNIC that is gone stay stuck")
        self.enemy = self.container("enemy2")
        self.enemy.exec(self.program, "once")
        return ""

    def block_near_halves(self):
        """A process that is looked at for ever fails its own vNIC and no other, and no more than so many near halves wait."""
        tricks, log = [], self.host.run_dir / "router.log"
        try:
            for count in range(1, HALVES_OF_VNIC_MAX + 2):
                running, is_in_force = self.start("fuse", 1)
                if not is_in_force:
                    return running.output().strip()
                tricks.append(running)
                until(lambda: log.read_text().count("vNIC failed") >= count, f"trick {count} fails no vNIC")
                self.is_answered()
            until(lambda: "no near half for a vNIC" in log.read_text(), "no trick is refused its near half")
            text = log.read_text()
            need(text.count("its near half does not answer") == HALVES_OF_VNIC_MAX, text)
            need(text.count("no near half for a vNIC") == 1, text)
        finally:
            for running in tricks:
                lift(running)
        until(lambda: self.enemy.start(self.program, "once").wait(20) == 0, "the vNIC is not served again")
        return ""

    def ends(self):
        """The router ends in order while such threads are stuck."""
        running, is_in_force = self.start("fuse", CONNECTS)
        if not is_in_force:
            return running.output().strip()
        until(lambda: self.are_stuck(IDENTIFIER_COUNT_MAX), "nobody is stuck")
        self.victim.terminate()
        need(self.victim.wait(30) == 0 and "all answered" in self.victim.output(), self.victim.output())
        harness.end_router(self.host, signal.SIGTERM)
        lift(running)
        running.process.wait(30)
        return ""


def lift(running):
    """Ends a trick. What is stopped or frozen is no longer."""
    for pid in list(harness.descendants(running.process.pid)):
        for group in FREEZER.glob(f"freeflow-stalls-{os.getpid()}"):
            (group / "freezer.state").write_text("THAWED")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGTERM)


@pytest.fixture(scope="module")
def stage(host):
    harness.require_commands("strace")
    return Stage(host)


@pytest.mark.parametrize("connections", [1, CONNECTS], ids=["one connection", "more connections than threads"])
def test_execve_while_fuse_has_the_mmap_lock(stage, held, connections):
    stage.stuck(connections)


@pytest.mark.parametrize("trick, amount", [("mprotect", 8), ("exec-loop", SECONDS), ("dies", SECONDS), ("connect", CONNECTS)],
                         ids=["execve while mprotect has the mmap lock", "exec in a loop", "processes that connect and die",
                              "many connections that say nothing"])
def test_tricks(stage, held, trick, amount):
    stage.trick(trick, amount)


def test_fuse_file_that_the_router_is_to_map(stage, held):
    stage.fuse_file()


def test_process_that_is_stopped(stage, held):
    stage.stopped()


@pytest.mark.parametrize("words", [("idle",), ("connect", 8)], ids=["idle", "with connections that say nothing"])
def test_frozen_cgroup(stage, held, words):
    stage.frozen(*words)


def test_page_under_userfaultfd(stage, held):
    stage.bad_memory("uffd-user")


def test_nothing_is_left_in_the_router(host, held):
    harness.wait_for_resources(host, held)


def test_vnic_goes_meanwhile(stage):
    stage.vnic_goes()


def test_router_ends_meanwhile(stage):
    stage.ends()


def test_near_halves_that_a_process_blocks():
    with Host("--attachment", "remote") as host:
        Stage(host).block_near_halves()
