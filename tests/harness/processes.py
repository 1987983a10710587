"""Programs with time limits, their output kept; and trying again where others' programs give up by themselves."""

import collections
import contextlib
import functools
import os
import pathlib
import select
import signal
import subprocess
import tempfile
import time

from harness.failure import Failure, need

# Of the case that runs: what it started last, and what still runs; their output is kept if it fails.
STARTED_MAX = 64
started = collections.deque(maxlen=STARTED_MAX)


def children(pid):
    """IDs of a process' children, whichever of its threads began them."""
    found = set()
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            found.update(int(word) for word in (task / "children").read_text().split())
    return found


def descendants(pid):
    """IDs of a process' children, of theirs and so on; each before its own."""
    with contextlib.suppress(OSError):
        for child in children(pid):
            yield child
            yield from descendants(child)


class Running:
    """A program in the background, its output in a file."""

    def __init__(self, command, env=None):
        self.command = [str(part) for part in command]
        self.output_file = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.DEVNULL, stdout=self.output_file, stderr=subprocess.STDOUT,
            start_new_session=True, env=env)
        started.append(self)

    def output(self):
        # By position: the program has the same open file, and writes where that stands.
        fd = self.output_file.fileno()
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")

    def wait(self, seconds):
        """The exit code, or Failure when the time is over (the program is then killed)."""
        if self.process.poll() is None:
            # `Popen.wait` looks for the end each 50 ms.
            end = os.pidfd_open(self.process.pid)
            try:
                poller = select.poll()
                poller.register(end, select.POLLIN)
                poller.poll(max(seconds, 0) * 1000)
            finally:
                os.close(end)
        code = self.process.poll()
        if code is None:
            where = "\n".join(waiting(self.process.pid))
            self.kill()
            raise Failure(f"`{self.text()}` did not end within {seconds} s; it printed:\n{self.output()}\n"
                          f"--- and waited here:\n{where}")
        return code

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
