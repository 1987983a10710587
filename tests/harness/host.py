"""A router with its own run directory, and containers on it.

Everything a test makes hangs under its Host and goes away with it, also on a failure or a signal, so that any number of
tests may run side by side.
"""

import contextlib
import json
import os
import pathlib
import select
import shutil
import signal
import sys
import tempfile
import time

from harness import paths, settings
from harness.failure import Failure, need
from harness.processes import Running, run, steady, waiting
from harness.programs import require_root
from harness.settings import PORT


class Container:
    def __init__(self, host, name, options=()):
        self.host, self.name = host, name
        # With the host's own files: tests read what programs have written. Containers without them are those of
        # tests/lifecycle/test_mounts.py.
        host.freeflow("run", "-d", "--share-host", "--name", name, *options, "--", "sleep", "infinity")
        row = next(row for row in host.containers() if row["name"] == name)
        self.ip, self.pid = row["ip"], int(row["pid"])
        self.background = []

    def command(self, *command):
        return self.host.command("exec", self.name, "--", *command)

    def exec(self, *command, seconds=60, codes=(0,)):
        return run(self.command(*command), seconds, codes=codes)

    def start(self, *command):
        running = Running(self.command(*command))
        self.background.append(running)
        return running

    def wait_for_port(self, running, port=PORT, seconds=20):
        """Until a program in the container listens on a TCP port, seen from outside, so without disturbing it."""
        row = f":{port:04X} "
        end = time.monotonic() + seconds
        while True:
            for table in ("tcp", "tcp6"):
                with open(f"/proc/{self.pid}/net/{table}") as sockets:
                    if any(row in line and " 0A " in line for line in sockets):
                        return
            code = running.process.poll()
            need(code is None, f"`{running.text()}` ended with {code} before it listened:\n{running.output()}")
            need(time.monotonic() < end, f"`{running.text()}` does not listen on {port}:\n{running.output()}\n"
                 + "\n".join(waiting(running.process.pid)))
            time.sleep(0.005)

    def kill_background(self):
        for running in self.background:
            running.kill()
        self.background.clear()

    def remove(self):
        self.kill_background()
        self.host.freeflow("rm", "-f", self.name)


class RunDirectory:
    """A run directory of its own, and the command that works on it; `close` is its end."""

    # The program that runs the command, with its options.
    prefix = ()

    # Of all routers so far: what their logs say of system calls that their filters refused. No test may cause any.
    refused_calls = set()

    def begin(self):
        require_root()
        self.freeflow_path = settings.DIST / "bin" / "freeflow"
        need(self.freeflow_path.exists(), f"{self.freeflow_path} is not built: run `make`")
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="freeflow-test."))
        self.run_dir = self.directory / "run"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def note_refused_calls(self):
        for log in self.run_dir.rglob("router.log*"):
            with contextlib.suppress(FileNotFoundError):
                lines = log.read_text(errors="replace").splitlines()
                RunDirectory.refused_calls |= {line.split(" ", 1)[1] for line in lines if "a system call was refused" in line}

    def command(self, *words):
        return [str(word) for word in (*self.prefix, self.freeflow_path, "--run-dir", self.run_dir, *words)]

    def freeflow(self, *words, seconds=60, codes=(0,)):
        return run(self.command(*words), seconds, codes=codes)


class Host(RunDirectory):
    """A router with its own run directory."""

    current = []
    switch = None

    def __init__(self, *up_options):
        self.begin()
        self.up_options = up_options
        self.pids = set()
        Host.current.append(self)
        try:
            self.up()
        except BaseException:
            self.close()
            raise

    def up(self):
        self.freeflow("up", *settings.up_options(self.up_options))
        self.pids.add(self.router_pid())
        self.choose_path()

    def choose_path(self):
        """As --data-path says; a network keeps it over restarts."""
        path = paths.wanted()
        if path == "routed":
            need(paths.set_path(self, path), "the router does not take the data path")
        elif path != "auto" and not self.switch:
            self.switch = paths.Switch(self, path)

    def stop_switch(self):
        if self.switch:
            self.switch.stop()
            self.switch = None

    def status(self):
        return json.loads(self.freeflow("status", "-o", "json"))

    def router_pid(self):
        return int((self.run_dir / "router.pid").read_text().split()[0])

    def is_up(self):
        return router_of(self.router_pid(), self.run_dir)

    def containers(self):
        return json.loads(self.freeflow("ps", "-o", "json"))

    def container(self, name, *options):
        return Container(self, name, options)

    def pair(self):
        return self.container("one"), self.container("two")

    def router_log(self):
        log = self.run_dir / "router.log"
        return log.read_text(errors="replace")[-1200:] if log.exists() else ""

    def close(self):
        """Removes everything, by force where the orderly way fails."""
        if self not in Host.current:
            return
        Host.current.remove(self)
        self.stop_switch()
        try:
            self.freeflow("down", "--force", seconds=30)
        except Failure as failure:
            print(f"  the host did not go down: {failure}", file=sys.stderr)
            for pid in self.pids:
                if router_of(pid, self.run_dir):
                    os.kill(pid, signal.SIGKILL)
        self.note_refused_calls()
        shutil.rmtree(self.directory, ignore_errors=True)


def end_router(host, number=signal.SIGKILL, seconds=20):
    """Ends the router, and returns when the whole process is gone, with all that it held."""
    pid = host.router_pid()
    pidfd = os.pidfd_open(pid)
    try:
        os.kill(pid, number)
        need(select.select([pidfd], [], [], seconds)[0], "the router does not end")
    finally:
        os.close(pidfd)
    return pid


def kill_router(host):
    """When it was dead, by CLOCK_MONOTONIC."""
    pid = host.router_pid()
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    died_ns = time.monotonic_ns()
    os.close(pidfd)
    return died_ns


def router_of(pid, run_dir):
    """Whether a process is the router of this run directory (its number may have been given away since)."""
    try:
        return str(run_dir).encode() in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@steady
def in_two_containers(server, client, server_command, client_command, seconds=60, port=PORT, codes=(0,)):
    """Runs a server and then a client that gets the server's address; gives both outputs.

    `{ip}` in the client's words is the server's address. Both must end by themselves, with one of the codes.
    """
    running = server.start(*server_command)
    try:
        server.wait_for_port(running, port)
        client_words = [str(word).replace("{ip}", server.ip) for word in client_command]
        begin = time.monotonic()
        try:
            output = client.exec(*client_words, seconds=seconds, codes=codes)
        except Failure as failure:
            raise Failure(f"{failure}\n--- the server printed:\n{running.output()}") from None
        code = running.wait(max(5, seconds - (time.monotonic() - begin)))
        need(code in codes, f"the server gave exit code {code}:\n{running.output()}\n--- the client printed:\n{output}")
        return running.output(), output
    finally:
        running.kill()
        server.background.remove(running)
