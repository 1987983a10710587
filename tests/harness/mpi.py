"""MPI jobs with a rank in each of several containers: who launches the ranks, and who compiles the program.

A launcher starts its daemons with an agent, as ssh is one. Containers have no such way to each other, so the agent writes the
command into a file, and the test, which may enter every container, runs it there and answers with its exit code.
"""

import pathlib
import tempfile
import time
import zipfile

from harness import processes, settings
from harness.failure import Failure, need
from harness.processes import Running, waiting

SOURCES = ("mpi.c", "mpi_windows.c")
FLAGS = ("-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O2", "-g", "-Wno-stringop-overflow")
WHEEL = "mpich==5.0.2"
AGENT = """#!/bin/sh
# agent ADDRESS COMMAND…: runs the command in the container with that address (tests/harness/mpi.py)
cd "$(dirname "$0")" || exit 1
name=$1.$$
shift
printf '%s' "$*" >"$name.new" && mv "$name.new" "$name.command"
until [ -e "$name.code" ]; do sleep 0.02; done
exit "$(cat "$name.code")"
"""


def unpacked_wheel():
    """MPICH as the Python wheel brings it, downloaded once; the directory with its bin and lib."""
    where = settings.TARGET / "test-programs" / WHEEL.replace("==", "-")
    if not (where / "bin" / "mpicc").exists():
        where.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=where.parent) as directory:
            processes.run(["python3", "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check",
                           "--dest", directory, WHEEL], 300)
            wheel, = pathlib.Path(directory).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(directory)
            data, = pathlib.Path(directory).glob("*.data/data")
            for program in (data / "bin").iterdir():
                program.chmod(0o755)
            try:
                data.rename(where)
            except OSError:  # another run of the test was first
                need((where / "bin" / "mpicc").exists(), f"{where} is in the way")
    return where


class Implementation:
    """A compiler, a launcher, and the launcher's arguments."""

    def __init__(self, name, compiler, launcher, is_hydra):
        self.name, self.compiler, self.launcher, self.is_hydra = name, compiler, launcher, is_hydra

    def build(self, directory):
        """Compiles the program; again for each run of a test, as installed libraries may have changed."""
        program = directory / f"mpi-{self.name.replace(' ', '-')}"
        sources = [settings.PROGRAMS / source for source in SOURCES]
        processes.run([self.compiler, *FLAGS, "-o", program, *sources], 120)
        return program

    def words(self, agent, addresses, settings):
        if self.is_hydra:
            env = [word for pair in settings.items() for word in ("-genv", *pair)]
            return [self.launcher, "-launcher", "rsh", "-launcher-exec", agent, "-localhost", addresses[0],
                    "-hosts", ",".join(addresses), "-n", len(addresses), *env]
        options = []
        for key, value in settings.items():
            options += ["-x", f"{key}={value}"] if key.isupper() else ["--mca", key, value]
        return [self.launcher, "--allow-run-as-root", "--host", ",".join(addresses), "--mca", "plm_rsh_agent", agent,
                "--mca", "oob_tcp_if_include", "ff0", "--mca", "btl_tcp_if_include", "ff0", *options]


def open_mpi():
    return Implementation("Open MPI", "mpicc.openmpi", "mpirun.openmpi", False)


def mpich_4():
    return Implementation("MPICH 4", "mpicc.mpich", "mpiexec.mpich", True)


def mpich_5():
    where = unpacked_wheel()
    return Implementation("MPICH 5", where / "bin" / "mpicc", where / "bin" / "mpiexec.hydra", True)


def run(implementation, containers, settings, command, seconds=60):
    """A job with a rank in each container, launched from the first; gives its output. All must end by itself with 0."""
    with tempfile.TemporaryDirectory(prefix="freeflow-mpi.") as directory:
        directory = pathlib.Path(directory)
        agent = directory / "agent"
        agent.write_text(AGENT)
        agent.chmod(0o755)
        addresses = [container.ip for container in containers]
        words = implementation.words(agent, addresses, settings)
        job = containers[0].start("sh", "-c", 'cd "$0" && exec "$@"', directory, *words, *command)
        daemons = {}
        try:
            code = serve(directory, dict(zip(addresses, containers)), job, daemons, seconds)
        finally:
            for running in [job, *daemons.values()]:
                running.kill()
        need(code == 0, f"`{job.text()}` gave exit code {code}:\n{job.output()}")
        return job.output()


def serve(directory, containers, job, daemons, seconds):
    """Runs what the agent asks for until the job is over; its exit code."""
    end = time.monotonic() + seconds
    while (code := job.process.poll()) is None:
        for ask in directory.glob("*.command"):
            if ask not in daemons:
                container = containers[ask.stem.rsplit(".", 1)[0]]
                daemons[ask] = Running(container.command("sh", "-c", ask.read_text()))
        for ask, running in daemons.items():
            answer = ask.with_suffix(".code")
            if running.process.poll() is not None and not answer.exists():
                unfinished = answer.with_suffix(".unfinished")
                unfinished.write_text(str(running.process.returncode))
                unfinished.rename(answer)
        if time.monotonic() > end:
            where = [line for running in (job, *daemons.values()) for line in waiting(running.process.pid)]
            raise Failure(f"`{job.text()}` did not end within {seconds} s; it printed:\n{job.output()}\n--- and all waited "
                              "here:\n" + "\n".join(where))
        time.sleep(0.01)
    return code
