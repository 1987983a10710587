"""Root file systems of container images: of releases, by debootstrap, and made of some of this machine's files."""

import contextlib
import pathlib
import re
import shutil
import time

from harness.failure import need
from harness.pingpong import listening
from harness.podman import DEVICE, LIMITS, UNPRIVILEGED
from harness.processes import Running, run, waiting
from harness.programs import LIBRARIES
from harness.roots import made_once

# Of a release's root: what runs there, by itself and between two containers.
PACKAGES = "ibverbs-utils,perftest"
READ_ONLY = ("--read-only",)
MUSL_LOADER = "lib/ld-musl-x86_64.so.1"


def cached(release):
    """The root of a Debian release, which nobody changes."""
    return made_once("images", release, release, PACKAGES)


def needed(program):
    """Paths of the libraries that the loader finds for a program here."""
    lines = run(["ldd", program]).splitlines()
    return [words[2] for words in map(str.split, lines) if len(words) > 2 and words[2].startswith("/")]


def bare(directory):
    """A root with the folders that engines mount something on, and nothing else."""
    for name in ("etc", "proc", "sys", "dev", "tmp", "run"):
        (directory / name).mkdir(parents=True)
    return directory


def of_programs(directory, *programs, without=()):
    """A root of some of this machine's programs and of the libraries that `ldd` lists, but those of some names."""
    bare(directory)
    libraries = directory / "usr/lib/x86_64-linux-gnu"
    for folder in (libraries, directory / "usr/bin", directory / "lib64"):
        folder.mkdir(parents=True)
    (directory / "lib").symlink_to("usr/lib")
    shutil.copy("/lib64/ld-linux-x86-64.so.2", directory / "lib64")
    # The loader of the drop-ins wants it; a program that can be cancelled has it.
    shutil.copy(LIBRARIES / "libgcc_s.so.1", libraries)
    for program in programs:
        shutil.copy(program, directory / "usr/bin")
        for library in needed(program):
            if not any(pathlib.Path(library).name.startswith(name) for name in without):
                shutil.copy(library, libraries)
    return directory


def inside(engine, root, *words, options=(), codes=(0,)):
    """The output of a command in an unprivileged container with that root."""
    return engine.run((*UNPRIVILEGED, *options), f"{root}:O", *words, codes=codes)


def pair(engine, root, words, result, options=()):
    """The output of a program that takes its server's address, each end in a container of its own; `result` is a
    pattern of what it prints."""
    start = ["run", "--rm", *LIMITS, *DEVICE, *UNPRIVILEGED, *options, "--rootfs", f"{root}:O", *words]
    with contextlib.ExitStack() as stack:
        server = Running(engine.command(*start))
        stack.callback(server.kill)
        end = time.monotonic() + 60
        row = None
        while not row or not listening(int(row["pid"])):
            need(server.process.poll() is None, f"the server ended early:\n{server.output()}")
            need(time.monotonic() < end, f"the server does not listen:\n{server.output()}\n"
                 + "\n".join(waiting(server.process.pid)))
            row = next((row for row in engine.host.containers() if row["pid"]), None)
            time.sleep(0.05)
        client = Running(engine.command(*start, row["ip"]))
        stack.callback(client.kill)
        for one, name in ((client, "client"), (server, "server")):
            code = one.wait(90)
            need(code == 0, f"the {name} gave {code}:\n{one.output()}")
        need(re.search(result, client.output()), f"no result ({result}) in:\n{client.output()}")
        return client.output()


def glibc_of(root):
    """Major and minor version."""
    text = run(["chroot", root, "ldd", "--version"]).splitlines()[0]
    return re.search(r"(\d+\.\d+)$", text).group(1)


def rdma_core_of(root):
    """The release of rdma-core that an image's libibverbs is of."""
    found = sorted((root / "usr/lib/x86_64-linux-gnu").glob("libibverbs.so.1.*"))
    need(found, f"no libibverbs in {root}")
    return int(found[0].name.split(".")[4])
