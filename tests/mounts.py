#!/usr/bin/env python3
"""What the host puts into a container stays the host's: its root can use it, not change it."""

import subprocess

import lib
from lib import need

LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1")


def is_library(path, names=LIBRARIES):
    """A mount is on the file that a name links to, libibverbs.so.1.14.44.0 say."""
    return any(f"/{name}" in path for name in names)


def mounts(container):
    """Path and options of what FreeFlow mounted."""
    lines = (line.split() for line in container.exec("cat", "/proc/self/mountinfo").splitlines())
    found = [(fields[4], fields[5].split(",")) for fields in lines
             if is_library(fields[4]) or fields[4] == "/run/freeflow"]
    # Of several mounts on one path the last is seen.
    return list(dict(found).items())


def read_only(container):
    found = mounts(container)
    need(any(path == "/run/freeflow" for path, _ in found), f"no vNIC is mounted: {found}")
    for library in LIBRARIES:
        need(any(is_library(path, [library]) for path, _ in found), f"no {library} is mounted: {found}")
    for path, options in found:
        need("ro" in options and "nosuid" in options and "nodev" in options, f"{path} is mounted {options}")
    return f"{len(found)} mounts"


def refused(container, *command):
    code = subprocess.run(container.command(*command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                          timeout=60).returncode
    need(code != 0, f"the container could: {' '.join(command)}")


def directory(container):
    """Else a container could fill the host's tmpfs, or lay a trap where the next router binds its socket."""
    for command in (["touch", "/run/freeflow/x"], ["rm", "-f", "/run/freeflow/router.sock"],
                    ["ln", "-sf", "/etc/shadow", "/run/freeflow/router.sock"], ["chmod", "0700", "/run/freeflow"],
                    ["mount", "-o", "remount,bind,rw", "/run/freeflow"], ["umount", "/run/freeflow"]):
        refused(container, *command)


def library(container):
    for path, _ in mounts(container):
        if is_library(path):
            # Opened for writing, nothing written: it is everybody's.
            refused(container, "sh", "-c", f": >> {path}")
            refused(container, "chmod", "0666", path)
            refused(container, "umount", path)


def init_is_closed(container):
    """PID 1 was the host's process once."""
    refused(container, "readlink", "/proc/1/cwd")
    refused(container, "cat", "/proc/1/environ")


def works(container):
    need("freeflow0" in container.exec("ibv_devinfo"), "the device is gone")


def test(checks):
    with lib.Host() as host:
        container = host.container("one")
        checks.check("FreeFlow's mounts are read-only", read_only, container)
        checks.check("the vNIC's directory can't be changed", directory, container)
        checks.check("the library can't be changed", library, container)
        checks.check("PID 1 can't be looked into", init_is_closed, container)
        checks.check("and all works", works, container)


if __name__ == "__main__":
    lib.main(test)
