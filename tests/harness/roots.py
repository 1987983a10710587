"""Bare Debian roots to install packages in: debootstrap's smallest, with the programs that FreeFlow calls.

Each is made once, below $XDG_CACHE_HOME/freeflow/roots (~/.cache), and copied for each test.
"""

import fcntl
import os
import pathlib
import shutil
import subprocess
import tempfile

from harness.processes import run
from harness.programs import require_commands, require_root

NEWEST = "bookworm"
# Of each, its C library: the drop-in libraries want glibc 2.17.
SUITES = {"bullseye": 2.31, "bookworm": 2.36, "trixie": 2.41}
PACKAGES = "iproute2,iptables"
# A root besides: the newest suite with an init.
SYSTEMD = "systemd"
MAKE_SECONDS = 900

# Makes the root the whole file system of a namespace, then runs what is on standard input there.
ENTER = """set -e
root=$1
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount --rbind /sys/fs/cgroup "$root/sys/fs/cgroup" || true
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
cd "$root"
pivot_root . mnt
exec chroot . /bin/sh -euc 'umount -l /mnt; exec /bin/sh -eu /tmp/script'
"""


def cached(suite):
    """The directory of a root that nobody changes: of a suite, or `SYSTEMD`."""
    more, release = (",systemd,systemd-sysv", NEWEST) if suite == SYSTEMD else ("", suite)
    return made_once("roots", suite, release, PACKAGES + more)


def made_once(folder, name, release, packages):
    """A root of a Debian release with these packages: made once, below $XDG_CACHE_HOME/freeflow (~/.cache)."""
    base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "freeflow" / folder
    base.mkdir(parents=True, exist_ok=True)
    root = base / name
    with open(base / f".{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.is_dir():
            require_root()
            require_commands("debootstrap")
            half = base / f".{name}.half"
            subprocess.run(["rm", "-rf", "--one-file-system", half], check=True)
            # Its mounts end with it, also when it is killed.
            words = ["unshare", "--mount", "debootstrap", "--variant=minbase", f"--include={packages}", release, half]
            run(words, MAKE_SECONDS)
            shutil.rmtree(half / "var/cache/apt/archives", ignore_errors=True)
            half.rename(root)
    return root


class Root:
    """A copy of a suite's root, which goes away with the `with`."""

    def __init__(self, suite=NEWEST):
        self.suite = suite

    def __enter__(self):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="freeflow-test-root."))
        self.path = self.directory / "root"
        self.environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8",
                            "FREEFLOW_CGROUP_KEEP": "all", "HOME": "/root"}
        run(["cp", "-a", "--reflink=auto", cached(self.suite), self.path], 120)
        return self

    def __exit__(self, *_):
        subprocess.run(["rm", "-rf", "--one-file-system", self.directory], check=True)

    def take(self, *files):
        """Copies files into the root's /tmp; their paths there."""
        for file in files:
            shutil.copy(file, self.path / "tmp")
        return [f"/tmp/{pathlib.Path(file).name}" for file in files]

    def run(self, *command, codes=(0,), seconds=120):
        """In the root, without /proc, /sys and network."""
        words = ["unshare", "--net", "chroot", self.path, *command]
        return run(words, seconds, env=self.environment, codes=codes)

    def script(self, text, codes=(0,), seconds=120):
        """A shell script in namespaces of its own, with /proc, /sys, /dev and /run; all that it starts ends with it."""
        (self.path / "tmp/script").write_text(text)
        words = ["unshare", "--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER, "sh", self.path]
        return run(words, seconds, env=self.environment, codes=codes)

    def file(self, name):
        return self.path / name.lstrip("/")

    def names(self, word="freeflow"):
        """All paths with a word in their names, but of dpkg's and apt's own notes and of /tmp."""
        left_out = ("var/lib/dpkg", "var/log", "tmp", "proc", "sys", "var/lib/systemd/deb-systemd-helper")
        found = (path.relative_to(self.path).as_posix() for path in self.path.rglob(f"*{word}*"))
        return sorted(name for name in found if not name.startswith(left_out))
