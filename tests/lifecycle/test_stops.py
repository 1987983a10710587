"""A router, or the disk under its store, that stops and goes on fails nobody.

Programs use control verbs and send messages all the while, new ones begin while nobody answers; all of them end well.
"""

import contextlib
import ctypes
import os
import pathlib
import shutil
import signal
import subprocess
import time

import pytest

import harness
from harness import PORT, Host, Running, need
from harness.settings import FULL

# The second is above the time that the library once waited for an answer.
STOPPED_SECONDS = (3, 36, 60) if FULL else (3,)
PTRACE_DETACH, PTRACE_SEIZE, PTRACE_INTERRUPT, WALL = 17, 0x4206, 0x4207, 0x40000000
IMAGE_BYTES = 64 << 20
GROUP = """apiVersion: freeflow.io/v1
kind: Group
metadata: {name: frozen}
spec: {tenant: red, members: [{labels: {tier: server}}]}
"""


def until(condition, what, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        need(time.monotonic() < end, what)
        time.sleep(0.01)


class Programs:
    """Control verbs, checked messages, and what begins in between."""

    def __init__(self, host):
        self.host, self.load, self.stalls = host, harness.program("load"), harness.program("stalls")
        self.one, self.two = host.pair()

    def start(self):
        self.there = self.one.start(self.load, "server", PORT)
        self.one.wait_for_port(self.there)
        self.here = self.two.start(self.load, "-e", "client", self.one.ip, PORT)
        self.verbs = self.two.start(self.stalls, "victim")
        self.here.wait_for_output("ready")
        self.verbs.wait_for_output(".")

    def begin(self):
        """A session that is asked for while nobody answers."""
        self.new = self.two.start(self.stalls, "once")

    def dots(self):
        return self.verbs.output().count(".")

    def stop(self):
        dots = self.dots()
        until(lambda: self.dots() > dots + 2 or self.verbs.process.poll() is not None, "no verb is answered any more")
        need(self.new.wait(30) == 0, f"who began meanwhile failed:\n{self.new.output()}")
        self.verbs.terminate()
        need(self.verbs.wait(30) == 0 and "all answered" in self.verbs.output(), self.verbs.output())
        self.here.terminate()
        for side in (self.here, self.there):
            code = side.wait(60)
            need(code == 0 and "all right" in side.output(), f"messages failed ({code}):\n{side.output()}")
        return self.here.output().strip().splitlines()[-1]


def router_stops(host, programs, seconds):
    pid = host.router_pid()
    programs.start()
    os.kill(pid, signal.SIGSTOP)
    try:
        programs.begin()
        time.sleep(seconds)
        need(programs.new.process.poll() is None, f"a session began while the router stood still:\n{programs.new.output()}")
    finally:
        os.kill(pid, signal.SIGCONT)
    note = programs.stop()
    need(host.router_pid() == pid and host.is_up(), "the router is another one")
    return note


@contextlib.contextmanager
def file_system(directory):
    """An ext4 of its own; `None` where there are no loop devices."""
    image, place = directory / "image", directory / "disk"
    place.mkdir()
    with open(image, "wb") as file:
        file.truncate(IMAGE_BYTES)
    if not shutil.which("mkfs.ext4") or subprocess.run(["mkfs.ext4", "-q", image], stderr=subprocess.DEVNULL).returncode:
        yield None
        return
    if subprocess.run(["mount", "-o", "loop", image, place], stderr=subprocess.DEVNULL).returncode:
        yield None
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def disk_freezes(directory):
    """A change is answered once it is stored, and not before; nobody fails meanwhile."""
    with file_system(directory) as disk:
        if disk is None:
            return "no loop devices here"
        with Host("--state", disk / "state") as host:
            programs = Programs(host)
            programs.start()
            harness.run(["fsfreeze", "--freeze", disk])
            try:
                (directory / "group.yaml").write_text(GROUP)
                change = Running(host.command("apply", "-f", directory / "group.yaml"))
                # All others are served: a new session, and verbs.
                dots = programs.dots()
                programs.begin()
                need(programs.new.wait(30) == 0, f"no session begins:\n{programs.new.output()}")
                until(lambda: programs.dots() > dots + 2, "verbs wait for the disk")
                time.sleep(STOPPED_SECONDS[0])
                need(change.process.poll() is None, f"answered before it was stored:\n{change.output()}")
            finally:
                harness.run(["fsfreeze", "--unfreeze", disk])
            need(change.wait(30) == 0, change.output())
            return programs.stop()


@contextlib.contextmanager
def thread_stopped(pid, name):
    """One thread of the router, by ptrace; the others run."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    tasks = [task for task in pathlib.Path(f"/proc/{pid}/task").iterdir() if (task / "comm").read_text().strip() == name]
    task = int(tasks[0].name)
    need(libc.ptrace(PTRACE_SEIZE, task, None, None) == 0, f"can't trace {name}: {os.strerror(ctypes.get_errno())}")
    try:
        libc.ptrace(PTRACE_INTERRUPT, task, None, None)
        os.waitpid(task, WALL)
        yield
    finally:
        libc.ptrace(PTRACE_DETACH, task, None, None)


def says_who(host):
    """`/livez` names the thread that does not answer, and no other."""
    ask = ["curl", "-sS", "--max-time", "20", "--unix-socket", host.run_dir / "api.sock", "http://localhost/livez"]
    silent = {"ff-control": "control: the thread does not answer", "ff-worker": "worker: it does not turn"}
    for name, words in silent.items():
        until(lambda: harness.run(ask) == "ok\n", "the router is not alive")
        with thread_stopped(host.router_pid(), name):
            # The last finding is reported for a second.
            until(lambda: harness.run(ask) != "ok\n", f"nobody misses {name}")
            said = harness.run(ask)
        others = [other for key, other in silent.items() if key != name]
        need(words in said and not any(other in said for other in others), f"of {name} it is said: {said}")
    until(lambda: harness.run(ask) == "ok\n", "the router is not alive again")


@pytest.fixture(scope="module")
def programs(host):
    harness.require_commands("fsfreeze", "curl")
    return Programs(host)


@pytest.mark.parametrize("seconds", STOPPED_SECONDS)
def test_router_stops(host, programs, seconds):
    router_stops(host, programs, seconds)


def test_thread_that_does_not_answer_is_named(host, programs):
    says_who(host)


def test_disk_under_the_store_freezes(host, programs):
    directory = pathlib.Path(host.directory) / "freeze"
    directory.mkdir()
    disk_freezes(directory)
