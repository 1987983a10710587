"""Docker and containerd of an unpacked folder (scripts/install-engines), beside whatever else runs on the machine.

Everything is their own: folders, sockets, cgroups, and a mount namespace in which /etc/cdi is the host's of the test, /run is
empty, and what engines write into /var/lib and /opt goes away. What runs there is ended by its id.
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time

from harness import made_images, settings
from harness.failure import Failure, need
from harness.host import Host
from harness.processes import Running, children, run
from harness.programs import program

SECONDS = 120
IMAGE = "example.org/freeflow-test:1"
# The same, whose programs are root's: containerd 1.6 has no option for that.
IMAGE_OF_ROOT = "example.org/freeflow-test-root:1"
PROGRAMS = ("sh", "ls", "cat", "sleep", "env", "ibv_devinfo", "ibv_rc_pingpong", "ib_write_bw", "rping")
# Of ours: containers that reach for others' things, and that send nonsense.
ENEMIES = ("escape", "hostile")
USER = "1000"
DEFAULT_CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP", "SETPCAP",
    "NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE")


# Makes the engine's mount namespace, and stays in it.
KEEP = """set -e
mkdir -p /etc/cdi
mount --bind "$1" /etc/cdi
mount -t tmpfs none /run
for folder in /var/lib /opt; do
    mkdir -p /run/over$folder /run/work$folder
    mount -t overlay -o "lowerdir=$folder,upperdir=/run/over$folder,workdir=/run/work$folder" overlay $folder
done
echo ready
exec sleep infinity
"""


def installed(name):
    """The folder of an engine, which is fetched once."""
    folder = pathlib.Path(os.environ.get("FREEFLOW_ENGINES", settings.TARGET / "engines"))
    run([settings.ROOT / "scripts" / "install-engines", folder], 600)
    return folder / name


def processes_with(word):
    """IDs of the processes that have a word in their command line."""
    for entry in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and word in (entry / "cmdline").read_bytes().decode(errors="replace").split("\0"):
                yield int(entry.name)


def wait_until(condition, what, seconds=SECONDS):
    """The condition's first value that is true; `what` may be a function: of what there is when the time is over."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        need(time.monotonic() < end, f"not within {seconds} s: {what() if callable(what) else what}")
        time.sleep(0.05)
    return found


class Containerd:
    """containerd with a host of FreeFlow, and what `ctr` does with both."""

    def __init__(self, folder):
        self.folder = installed(folder)
        self.running = []
        self.cdi = tempfile.mkdtemp(prefix="freeflow-test-cdi.")
        self.host = Host("--cdi-dir", self.cdi)
        self.directory = self.host.directory / "e"
        self.namespace = f"freeflow-test-{os.getpid()}"
        self.cgroup = f"/{self.namespace}"
        try:
            self.directory.mkdir()
            self.runtime = self.directory / "freeflow-runtime"
            self.runtime.symlink_to(self.host.freeflow_path)
            self.begin()
        except BaseException:
            self.close()
            raise

    def begin(self):
        self.keeper = self.start(["unshare", "--mount", "--propagation", "private", "sh", "-c", KEEP, "sh", self.cdi])
        self.keeper.wait_for_output("ready")
        self.socket = self.directory / "c.sock"
        config = self.directory / "containerd.toml"
        config.write_text(f'version = 2\nroot = "{self.directory}/root"\nstate = "{self.directory}/state"\n'
                          f'{self.plugins()}[grpc]\naddress = "{self.socket}"\n')
        self.start(self.inside("containerd", "--config", config))
        wait_until(self.socket.exists, "containerd's socket")
        self.root = made_images.make_root(self.directory / "image", *PROGRAMS, *map(program, ENEMIES))
        self.begin_more()
        self.import_root(IMAGE)

    def plugins(self):
        """Settings of containerd's parts."""
        return 'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n'

    def begin_more(self):
        """What runs upon containerd."""

    def import_root(self, name, root=None, environment=(), labels=(), entrypoint=(), user=USER):
        """An image of a root file system, whose author has set variables and labels (KEY=VALUE)."""
        file = self.directory / "image.tar"
        config = {"User": user, "Env": ["PATH=/bin", *environment], "Entrypoint": list(entrypoint),
                  "Labels": dict(label.split("=", 1) for label in labels)}
        made_images.archive(root or self.root, file, config, name)
        self.ctr("image", "import", file)
        file.unlink()

    def environment(self):
        paths = [str(self.folder / "usr/bin"), str(self.folder / "usr/sbin"), os.environ["PATH"], "/usr/sbin"]
        return os.environ | {"PATH": ":".join(paths), "FREEFLOW_RUN_DIR": str(self.host.run_dir)}

    def inside(self, *words):
        """A command in the engine's mount namespace."""
        return ["nsenter", f"--mount=/proc/{self.keeper.process.pid}/ns/mnt", *map(str, words)]

    def start(self, words):
        self.running.append(running := Running(words, self.environment()))
        return running

    def client(self, *words):
        return self.inside("ctr", "--address", self.socket, "--namespace", self.namespace, *words)

    def ctr(self, *words):
        return run(Containerd.client(self, *words), SECONDS, self.environment())

    def call(self, *words, codes=(0,), seconds=SECONDS):
        return run(self.client(*words), seconds, self.environment(), codes)

    # Of all engines: the words that give a container its vNIC.

    def by_cdi(self, device="freeflow.io/net=default"):
        return ["--device", device]

    def by_runtime(self, network=None):
        annotation = ["--annotation", f"freeflow.io/network={network}"] if network else []
        return ["--runc-binary", str(self.runtime), *annotation]

    def rights(self, is_root):
        """Without any; or a container's usual root."""
        return ["--seccomp", *(word for name in DEFAULT_CAPABILITIES for word in ("--cap-drop", f"CAP_{name}") if not is_root)]

    def run_words(self, name, given, words, detach, image, is_root=False):
        options = ["--detach"] if detach else ["--rm"]
        return ["run", *options, *self.rights(is_root), *given, image, name, *words]

    def run(self, name, given, *words, codes=(0,), image=IMAGE, is_root=False):
        image = self.image_of_root() if is_root else image
        return self.call(*self.run_words(name, given, words, False, image, is_root), codes=codes)

    def image_of_root(self):
        self.import_root(IMAGE_OF_ROOT, user="0")
        return IMAGE_OF_ROOT

    def detached(self, name, given, *words, image=IMAGE):
        self.call(*self.run_words(name, given, words, True, image))

    def begun(self, name, given, *words, image=IMAGE):
        """The same as `run`, without waiting."""
        return self.start(self.client(*self.run_words(name, given, words, False, image)))

    def remove(self, name):
        self.call("task", "kill", "--signal", "9", name, codes=(0, 1))
        self.call("task", "delete", name, codes=(0, 1))
        self.call("container", "delete", name, codes=(0, 1))

    def names(self):
        return self.call("container", "ls", "-q").split()

    def shim_of(self, _name):
        return next(pid for pid in processes_with(str(self.socket)) if b"containerd-shim" in cmdline(pid))

    # Of the host.

    def vnics(self):
        return self.host.status()["vnics"]

    def address(self):
        """Of the only container."""
        rows = self.host.containers()
        need(len(rows) == 1, f"{len(rows)} containers instead of one")
        return rows[0]["ip"]

    def wait_for_no_vnic(self):
        wait_until(lambda: not self.vnics(), "the vNICs are gone")

    def close(self):
        with contextlib.suppress(Failure, subprocess.SubprocessError):
            for name in self.names():
                self.remove(name)
        for running in reversed(self.running[1:]):
            running.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(20)
            running.kill()
        self.end_shims()
        for running in self.running[:1]:
            running.kill()
        self.host.close()
        self.remove_cgroups()
        shutil.rmtree(self.cdi, ignore_errors=True)

    def end_shims(self):
        for pid in list(processes_with(str(self.socket))):
            for victim in [*children(pid), pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)

    def remove_cgroups(self):
        for folder in pathlib.Path("/sys/fs/cgroup").glob(f"*{self.cgroup}"):
            for path in [*sorted(folder.glob("**/"), reverse=True)]:
                with contextlib.suppress(OSError):
                    path.rmdir()


def cmdline(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


class Docker(Containerd):
    """dockerd upon that containerd."""

    def begin(self):
        self.docker_socket = self.directory / "d.sock"
        super().begin()

    def begin_more(self):
        arguments = {"freeflow": [], **{f"freeflow-{name}": ["--network", name] for name in ("red", "blue")}}
        runtimes = {name: {"path": str(self.runtime), "runtimeArgs": ["--run-dir", str(self.host.run_dir), *more]}
                    for name, more in arguments.items()}
        daemon = {"bridge": "none", "iptables": False, "ip6tables": False, "ip-forward": False, "runtimes": runtimes,
                  "data-root": f"{self.directory}/d", "exec-root": f"{self.directory}/x", "pidfile": f"{self.directory}/p",
                  "hosts": [f"unix://{self.docker_socket}"], "containerd": str(self.socket), "cgroup-parent": self.cgroup}
        if self.knows_cdi():
            daemon |= {"features": {"cdi": True}, "cdi-spec-dirs": ["/etc/cdi"]}
        config = self.directory / "daemon.json"
        config.write_text(json.dumps(daemon))
        self.start(self.inside("dockerd", "--config-file", config))
        wait_until(self.docker_socket.exists, "dockerd's socket")

    def import_root(self, name, root=None, environment=(), labels=()):
        file = self.directory / "image.tar"
        file.write_bytes(made_images.layer_of(root or self.root))
        changes = ["ENV PATH=/bin", *(f"ENV {word}" for word in environment), *(f"LABEL {word}" for word in labels)]
        self.call("import", *(word for change in changes for word in ("--change", change)), file, name)
        file.unlink()

    def knows_cdi(self):
        return "Docker version 2" in (text := run([self.folder / "usr/bin/docker", "--version"])) and "version 20" not in text

    def client(self, *words):
        return self.inside("docker", "--host", f"unix://{self.docker_socket}", *words)

    def by_runtime(self, network=None):
        return ["--runtime", "freeflow", *(["--annotation", f"freeflow.io/network={network}"] if network else [])]

    def image_of_root(self):
        return IMAGE

    def rights(self, is_root):
        rights = ["--user", "0"] if is_root else ["--user", USER, "--cap-drop", "all", "--security-opt", "no-new-privileges"]
        return [*rights, "--network", "none"]

    def run_words(self, name, given, words, detach, image, is_root=False):
        return ["run", *(["--detach"] if detach else []), "--rm", "--name", name, *self.rights(is_root), *given, image, *words]

    def remove(self, name):
        self.call("rm", "--force", name, codes=(0, 1))

    def names(self):
        return self.call("ps", "--all", "--quiet").split()

    def shim_of(self, name):
        id_ = self.call("inspect", "--format", "{{.Id}}", name).strip()
        return next(pid for pid in processes_with(id_) if b"containerd-shim" in cmdline(pid))
