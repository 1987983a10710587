"""podman with the CDI device of a host, and a store of its own."""

import contextlib
import shutil
import tempfile

from harness.host import Host
from harness.processes import run
from harness.programs import require_commands

LIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")
DEVICE = ("--device", "freeflow.io/net=default")
UNPRIVILEGED = ("--network", "none", "--cap-drop", "all", "--user", "1000", "--security-opt", "no-new-privileges")


class Podman:
    """In mount namespaces where /etc/cdi is this host's: other hosts' devices have the same names."""

    def __init__(self, host):
        self.host = host
        store = ["--root", host.directory / "podman", "--runroot", host.directory / "podman-run"]
        self.podman = ["podman", "--runtime", "runc", *store, "--cgroup-manager", "cgroupfs", "--events-backend", "none"]

    def command(self, *words):
        script = 'mkdir -p /etc/cdi && mount --bind "$1" /etc/cdi && shift && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", script, "sh", self.host.directory / "cdi", *self.podman, *words]

    def unprivileged(self, *words):
        return self.command("run", "--rm", *LIMITS, *DEVICE, *UNPRIVILEGED, "--rootfs", "/:O", *words)

    def run(self, options, rootfs, *words, codes=(0,)):
        return run(self.command("run", "--rm", *LIMITS, *DEVICE, *options, "--rootfs", rootfs, *words), 90, codes=codes)

    def close(self):
        run(self.command("rm", "--force", "--time", "0", "--all"))


@contextlib.contextmanager
def on_own_host(kind=Host):
    """A host that writes its CDI devices into a folder of its own, and podman on it."""
    require_commands("podman", "runc")
    cdi = tempfile.mkdtemp(prefix="freeflow-test-cdi.")
    try:
        with kind("--cdi-dir", cdi) as host:
            shutil.copytree(cdi, host.directory / "cdi")
            podman = Podman(host)
            try:
                yield podman
            finally:
                podman.close()
    finally:
        shutil.rmtree(cdi, ignore_errors=True)
