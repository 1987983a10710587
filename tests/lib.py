"""What the end-to-end tests share: a host with its own run directory, containers on it, checks that count.

A test file makes a `Host`, starts programs in containers on it and calls `check` for each thing that it shows; `finish`
prints the totals that `scripts/test-stages` adds up. Everything a test makes hangs under its Host and goes away with it,
also on a failure or a signal, so that any number of tests may run side by side.
"""

import contextlib
import fcntl
import functools
import json
import os
import pathlib
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback

import lib_paths

ROOT = pathlib.Path(__file__).resolve().parent.parent
DIST = pathlib.Path(os.environ.get("FREEFLOW_DIST", ROOT / "dist"))
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
FULL = os.environ.get("FREEFLOW_TEST_FULL") == "1"
SEED = int(os.environ.get("FREEFLOW_TEST_SEED", "20261121"))
SAMPLE = int(os.environ.get("FREEFLOW_TEST_SAMPLE", "1"))  # one of so many cases runs, where a test has many
# Routers have so many workers, which then copy all that they can; else as a host does by itself.
WORKERS = os.environ.get("FREEFLOW_TEST_WORKERS")
UP_OPTIONS = ("--workers", WORKERS, "--move-bytes-min", "1") if WORKERS else ()
# What keeps count of these programs' memory must go on doing so: see crates/cli/src/cgroup.rs.
os.environ.setdefault("FREEFLOW_CGROUP_KEEP", "memory")
PORT = 18515  # perftest's own; each container has its own ports


class Failure(Exception):
    """Something is not as it should be; the text says what."""


def need(condition, text):
    if not condition:
        raise Failure(text)


def sample(names):
    """All of them, or those that the seed chooses; never none."""
    chosen = random.Random(SEED)
    return [name for name in names if chosen.randrange(SAMPLE) == 0] or list(names)[:1]


def require_root():
    if os.geteuid() != 0:
        sys.exit("these tests make network and mount namespaces: run them as root")


def require_commands(*names):
    """Ends the test, as failed, where a program that it runs is not installed."""
    missing = [name for name in names if not shutil.which(name)]
    if missing:
        sys.exit(f"missing here: {', '.join(missing)} (scripts/install-deps installs them)")


def program(name):
    """The path of a C test program, built if need be."""
    out = TARGET / "test-programs"
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make = ["make", "-s", "-C", ROOT / "tests" / "c", f"OUT={out}"]
        built = subprocess.run(make, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    need(built.returncode == 0, f"the C test programs don't build:\n{built.stdout}")
    return str(out / name)


# ---- programs with time limits


class Running:
    """A program in the background, its output in a file."""

    def __init__(self, command, env=None):
        self.command = [str(part) for part in command]
        self.output_file = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.DEVNULL, stdout=self.output_file, stderr=subprocess.STDOUT,
            start_new_session=True, env=env)

    def output(self):
        # By position: the program has the same open file, and writes where that stands.
        fd = self.output_file.fileno()
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")

    def wait(self, seconds):
        """The exit code, or Failure when the time is over (the program is then killed)."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            where = "\n".join(waiting(self.process.pid))
            self.kill()
            raise Failure(f"`{self.text()}` did not end within {seconds} s; it printed:\n{self.output()}\n"
                          f"--- and waited here:\n{where}") from None

    def wait_for_output(self, word, seconds=20):
        end = time.monotonic() + seconds
        while word not in self.output():
            code = self.process.poll()
            need(code is None, f"`{self.text()}` ended early with exit code {code}:\n{self.output()}")
            need(time.monotonic() < end, f"`{self.text()}` never said '{word}':\n{self.output()}\n"
                 + "\n".join(waiting(self.process.pid)))
            time.sleep(0.005)
        return self.output()

    def terminate(self):
        if self.process.poll() is None:
            self.process.terminate()

    def kill(self):
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def text(self):
        return " ".join(self.command)


def waiting(pid, depth=0):
    """A process and its descendants, and what the kernel says that each waits for: a line each."""
    proc = pathlib.Path(f"/proc/{pid}")
    try:
        state = (proc / "stat").read_text().rsplit(")", 1)[1].split()[0]
        where = (proc / "wchan").read_text() or "-"
        command = (proc / "cmdline").read_text().replace("\0", " ")[:100] or (proc / "comm").read_text().strip()
        children = (proc / "task" / str(pid) / "children").read_text().split()
    except OSError:
        return
    yield f"{'  ' * depth}{pid} {state} {where}: {command}"
    for child in children:
        yield from waiting(int(child), depth + 1)


def run(command, seconds=60, env=None, codes=(0,)):
    """Runs to the end and gives the output; Failure for another exit code or more time."""
    running = Running(command, env)
    try:
        code = running.wait(seconds)
    except BaseException:
        running.kill()
        raise
    need(code in codes, f"`{running.text()}` gave exit code {code}:\n{running.output()}")
    return running.output()


# ---- a host and its containers


class Container:
    def __init__(self, host, name, options=()):
        self.host, self.name = host, name
        # With the host's own files: tests read what programs have written. What a container without is like shows tests/mounts.py.
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

    # Of all routers so far: what their logs say of system calls that their filters refused. No test may cause any.
    refused_calls = set()

    def begin(self):
        require_root()
        self.freeflow_path = DIST / "bin" / "freeflow"
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
        return [str(word) for word in (self.freeflow_path, "--run-dir", self.run_dir, *words)]

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
        self.freeflow("up", *(() if "--workers" in self.up_options else UP_OPTIONS), *self.up_options)
        self.pids.add(self.router_pid())
        self.choose_path()

    def choose_path(self):
        """As FREEFLOW_TEST_DATA_PATH says; a network keeps it over restarts."""
        path = lib_paths.wanted()
        if path == "routed":
            need(lib_paths.set_path(self, path), "the router does not take the data path")
        elif path != "auto" and not self.switch:
            self.switch = lib_paths.Switch(self, path)

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


class LabHost(Host):
    """One host of a Lab: everything that a Host is, in a network of its own."""

    def __init__(self, lab, number):  # the lab has brought it up
        self.lab, self.number = lab, number
        self.freeflow_path = lab.freeflow_path
        self.run_dir = lab.path / f"host{number}"
        self.up_options = ()
        self.pids = {self.router_pid()}
        Host.current.append(self)
        self.choose_path()

    def enter(self, *words):
        """The command that runs a program in the host's own network, outside of any container."""
        return self.lab.command("lab", "enter", "--host", self.number, "--", *words)

    def wire(self):
        """What the router says about packets to and from other hosts."""
        return json.loads(self.freeflow("wire", "status", "-o", "json"))

    def close(self):
        self.lab.close()


class Lab(RunDirectory):
    """Several hosts on this machine; `pair` gives containers on the first two, as a Host gives two of its own."""

    def __init__(self, hosts=2, mtu=1500, *up_options):
        self.begin()
        self.path = self.run_dir / "labs" / "lab"
        self.hosts = []
        try:
            self.freeflow("lab", "up", "--hosts", hosts, "--mtu", mtu, *UP_OPTIONS, *up_options)
            for number in range(1, hosts + 1):
                self.hosts.append(LabHost(self, number))
        except BaseException:
            self.close()
            raise

    def host(self, number):
        """Numbered from 1, as the command does."""
        return self.hosts[number - 1]

    def pair(self):
        return self.host(1).container("one"), self.host(2).container("two")

    def status(self):
        return json.loads(self.freeflow("lab", "status", "-o", "json"))

    def wait_for_peers(self, seconds=20):
        """Until every router is connected with every other."""
        end = time.monotonic() + seconds
        for host in self.hosts:
            while any(peer["state"] != "up" for peer in json.loads(host.freeflow("peers", "ls", "-o", "json"))["peers"]):
                need(time.monotonic() < end, f"host {host.number} does not reach the others")
                time.sleep(0.02)

    def cut(self, number):
        self.freeflow("lab", "cut", "--host", number)

    def heal(self, number):
        self.freeflow("lab", "heal", "--host", number)

    def close(self):
        """Removes everything, by force where the orderly way fails."""
        if self.directory is None:
            return
        for host in self.hosts:
            if host in Host.current:
                Host.current.remove(host)
            host.stop_switch()
        directory, self.directory = self.directory, None
        self.note_refused_calls()  # the logs go with their hosts
        try:
            self.freeflow("lab", "down", "--force", seconds=60)
        except Failure as failure:
            print(f"  the lab did not go down: {failure}", file=sys.stderr)
            for pid in {pid for host in self.hosts for pid in host.pids}:
                if router_of(pid, self.run_dir):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)


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


def router_of(pid, run_dir):
    """Whether a process is the router of this run directory (its number may have been given away since)."""
    try:
        return str(run_dir).encode() in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


# Where perftest gives up by itself on a machine, or in an emulator, where it waits for its turn: it measures the clock's rate before it
# begins, and wants samples that don't scatter; with -R the client of the second connection may come before its server listens for
# that, and does not try again (RC: rejected, no such service; UD: unreachable, the same). That says nothing about what is tested.
# Programs of it end with 0 then, without a row: who looks for one is steady too.
GIVES_UP = ("Correlation coefficient", "Event: RDMA_CM_EVENT_REJECTED; error: 8.", "Event: RDMA_CM_EVENT_UNREACHABLE; error: 1.")


def again_after(texts, tries):
    """Runs a function again, so many times in all, where its failure has one of the texts."""
    def decorate(function):
        @functools.wraps(function)
        def again(*arguments, **options):
            for last in [False] * (tries - 1) + [True]:
                try:
                    return function(*arguments, **options)
                except Failure as failure:
                    if last or not any(text in str(failure) for text in texts):
                        raise
        return again
    return decorate


steady = again_after(GIVES_UP, 5)


@steady
def in_two_containers(server, client, server_command, client_command, seconds=60, port=PORT):
    """Runs a server and then a client that gets the server's address; gives both outputs.

    `{ip}` in the client's words is the server's address. Both must end by themselves with 0.
    """
    running = server.start(*server_command)
    try:
        server.wait_for_port(running, port)
        client_words = [str(word).replace("{ip}", server.ip) for word in client_command]
        begin = time.monotonic()
        try:
            output = client.exec(*client_words, seconds=seconds)
        except Failure as failure:
            raise Failure(f"{failure}\n--- the server printed:\n{running.output()}") from None
        code = running.wait(max(5, seconds - (time.monotonic() - begin)))
        need(code == 0, f"the server gave exit code {code}:\n{running.output()}\n--- the client printed:\n{output}")
        return running.output(), output
    finally:
        running.kill()
        server.background.remove(running)


# ---- what the router holds


def router_resources(host):
    """What may not grow: counts by the router's own word, and its descriptors and mappings by the kernel's."""
    status = host.status()
    counts = {key: status[key] for key in ("session_count", "pd_count", "qp_count", "cq_count", "srq_count", "mr_count",
                                           "mw_count", "xrcd_count", "registered_bytes", "segment_count",
                                           "segment_bytes")}
    proc = pathlib.Path(f"/proc/{host.router_pid()}")
    counts["descriptors"] = len(list((proc / "fd").iterdir()))
    counts["mappings"] = sum("memfd" in line for line in (proc / "maps").read_text().splitlines())
    return counts


def router_memory_kib(host):
    for line in pathlib.Path(f"/proc/{host.router_pid()}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise Failure("the router has no VmRSS")


def wait_for_resources(host, wanted, seconds=10):
    """Until the router holds what it held before; Failure names what it does not let go."""
    end = time.monotonic() + seconds
    while True:
        now = router_resources(host)
        # What is read right after a command may still count its connection: fewer is as good.
        fewer = all(now[key] <= wanted[key] for key in ("descriptors", "mappings"))
        if fewer and all(now[key] == wanted[key] for key in wanted if key not in ("descriptors", "mappings")):
            return
        left = {key: f"{wanted[key]} then, {now[key]} now" for key in wanted if wanted[key] != now[key]}
        need(time.monotonic() < end, f"the router does not return to what it held: {left}")
        time.sleep(0.05)


# ---- counting


class Checks:
    def __init__(self):
        self.passed = self.failed = self.skipped = 0

    def check(self, name, function, *arguments):
        begin = time.monotonic()
        try:
            note = function(*arguments)
        except (Failure, OSError, LookupError, StopIteration, subprocess.SubprocessError) as failure:
            self.failed += 1
            print(f"FAILED    {name}", flush=True)
            text = str(failure) if isinstance(failure, Failure) else traceback.format_exc()
            for line in text.splitlines():
                print(f"    {line}", flush=True)
            for host in Host.current:
                print(f"    --- the end of {host.run_dir}/router.log:\n{host.router_log()}", flush=True)
            return False
        self.passed += 1
        print(f"ok        {name}  [{time.monotonic() - begin:.1f} s]{'  ' + note if note else ''}", flush=True)
        return True

    def skip(self, name, reason):
        self.skipped += 1
        print(f"skipped   {name}: {reason}", flush=True)

    def finish(self):
        if RunDirectory.refused_calls:
            self.failed += 1
            print("FAILED    the routers' threads made only system calls of their lists (crates/router/src/base/system_calls.rs)")
            print("\n".join(f"    {line}" for line in sorted(RunDirectory.refused_calls)))
        print(f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped", flush=True)
        sys.exit(1 if self.failed or not self.passed else 0)


def main(function):
    """Runs a test file's function with a Checks, and cleans up also when told to end."""

    def on_signal(number, _):
        # Once: another one would break off the tidying up.
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, on_signal)
    checks = Checks()
    try:
        function(checks)
    except Failure as failure:
        checks.failed += 1
        print(f"FAILED    {failure}", flush=True)
        for host in Host.current:
            print(f"    --- the end of {host.run_dir}/router.log:\n{host.router_log()}", flush=True)
    finally:
        for host in list(Host.current):
            host.close()
    checks.finish()
