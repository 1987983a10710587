"""A machine for tests of programs that want one for themselves: namespaces below one process, and files of its own.

That process and all that is inside end with the test, also when that is killed. Inside, /etc, /opt, /usr and /var are
overlays, /run is empty, the network is a link to the other machines, and sysctls that a kubelet sets are files. On the
outside there are only a folder in /tmp and cgroups, which go away at the end, or when the next test begins.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile

from harness.engines import wait_until
from harness.failure import need
from harness.processes import Running, children, run

SECONDS = 120
PREFIX = "freeflow-test-machine."
CGROUPS = pathlib.Path("/sys/fs/cgroup")
BRIDGE = "nodes0"
OVERLAYS = ("etc", "opt", "usr", "var")
# Of the whole kernel, and set by a kubelet.
SYSCTLS = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops", "kernel/keys/root_maxkeys",
           "kernel/keys/root_maxbytes")
# PID 1 inside: it waits for children that others have left. Its arguments: the folder, the address.
BEGIN = """set -e
directory=$1 address=$2
mount --make-rprivate /
for name in %s; do
    mkdir -p "$directory/upper/$name" "$directory/scratch/$name"
    mount -t overlay overlay \\
        -o "lowerdir=/$name,upperdir=$directory/upper/$name,workdir=$directory/scratch/$name" "/$name"
done
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/lock /run/netns /var/lib/kubelet /var/log/pods
for name in kubelet:/var/lib/kubelet pods:/var/log/pods; do
    mkdir -p "$directory/${name%%%%:*}"
    mount --bind "$directory/${name%%%%:*}" "${name#*:}"
done
# In a user namespace a proc can be mounted only where one is seen whole, and the machine's own is not.
mkdir "$directory/proc"
mount -t proc proc "$directory/proc"
for name in %s; do
    mkdir -p "$directory/sysctl/${name%%/*}"
    cat "/proc/sys/$name" >"$directory/sysctl/$name"
    mount --bind "$directory/sysctl/$name" "/proc/sys/$name"
done
mount --make-rshared /
ip link set lo up
ip link add node0 type veth peer name outside0
ip address add "$address/24" dev node0
ip link set node0 up
ip link set outside0 up
ip route add default dev node0
echo 1 >/proc/sys/net/ipv4/ip_forward
echo ready
sleep infinity &
while :; do wait; done
""" % (" ".join(OVERLAYS), " ".join(SYSCTLS))


def remove_cgroups(name):
    for folder in CGROUPS.glob(f"*/{name}"):
        for path in sorted(folder.glob("**/"), reverse=True):
            with contextlib.suppress(OSError):
                path.rmdir()


def remove_left():
    """Of tests that were killed: their processes have ended with them."""
    for folder in pathlib.Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        owner = folder / "owner"
        if owner.exists() and not pathlib.Path(f"/proc/{owner.read_text()}").exists():
            remove_cgroups(folder.name)
            shutil.rmtree(folder, ignore_errors=True)


class Machine:
    """`paths` are folders of programs that come first inside; the first machine has the others' links in its bridge."""

    def __init__(self, address, paths=(), first=None):
        remove_left()
        self.address, self.paths = address, paths
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix=PREFIX))
        self.cgroup = self.directory.name
        (self.directory / "owner").write_text(str(os.getpid()))
        (self.directory / "logs").mkdir()
        self.running = {}
        self.keeper = None
        try:
            self.begin()
            self.connect(first or self)
        except BaseException:
            self.close()
            raise

    def begin(self):
        words = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child",
                 "--mount-proc", "sh", "-c", BEGIN, "sh", self.directory, self.address]
        self.keeper = Running(words)
        self.keeper.wait_for_output("ready")
        self.first_pid = children(self.keeper.process.pid).pop()

    def connect(self, first):
        name = f"outside{self.address.rsplit('.', 1)[1]}"
        if first is self:
            self.call("ip", "link", "add", BRIDGE, "type", "bridge")
            self.call("ip", "link", "set", BRIDGE, "up")
        self.call("ip", "link", "set", "outside0", "down")
        self.call("ip", "link", "set", "outside0", "name", name)
        if first is not self:
            run(["nsenter", f"--target={self.first_pid}", "--net", "ip", "link", "set", name, "netns", str(first.first_pid)])
        first.call("ip", "link", "set", name, "master", BRIDGE, "up")

    def path(self, name):
        """Of a file inside, as seen from here."""
        return pathlib.Path(f"/proc/{self.first_pid}/root") / str(name).lstrip("/")

    def pid_here(self, pid):
        """The ID that a process inside has here, or `None`."""
        inside = os.readlink(f"/proc/{self.first_pid}/ns/pid")
        for entry in pathlib.Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if entry.name.isdigit() and os.readlink(entry / "ns/pid") == inside:
                    lines = (entry / "status").read_text().splitlines()
                    numbers = next(line.split() for line in lines if line.startswith("NSpid:"))
                    if int(numbers[-1]) == pid:
                        return int(entry.name)
        return None

    def make_cgroups(self):
        """One of its name for each controller."""
        for controller in CGROUPS.iterdir():
            if (controller / "cgroup.procs").exists():
                (controller / self.cgroup).mkdir(exist_ok=True)

    # ---- programs

    def inside(self, *words):
        """The command that runs another one inside."""
        return ["nsenter", f"--target={self.first_pid}", "--mount", "--net", "--pid", "--ipc", "--uts", *map(str, words)]

    def environment(self):
        paths = ":".join([*map(str, self.paths), os.environ["PATH"], "/usr/sbin", "/sbin"])
        left_out = ("KUBECONFIG", "TMPDIR", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
        kept = {name: value for name, value in os.environ.items() if name not in left_out}
        return kept | {"PATH": paths, "HOME": str(self.directory)}

    def call(self, *words, codes=(0,), seconds=SECONDS):
        return run(self.inside(*words), seconds, self.environment(), codes)

    def start(self, name, *words, **more):
        """A program that runs as long as the machine; `stop` ends it. `more` are variables of its environment."""
        with open(self.directory / "logs" / f"{name}.log", "ab") as output:
            self.running[name] = subprocess.Popen(
                self.inside(*words), stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self.environment() | more,
                start_new_session=True)

    def stop(self, name, number=signal.SIGTERM, seconds=30):
        """`nsenter` has made a child, and ends when that does."""
        process = self.running.pop(name)
        for pid in children(process.pid) if process.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(seconds)

    def need_running(self, name):
        code = self.running[name].poll()
        need(code is None, f"{name} ended with {code}:\n{self.log(name)}")

    def log(self, name, lines=100):
        path = self.directory / "logs" / f"{name}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    # ---- the end

    def close(self):
        for name in list(reversed(self.running)):
            self.stop(name, signal.SIGKILL)
        if self.keeper:
            self.keeper.kill()
        # The kernel ends the last of them by itself, which may take a moment.
        wait_until(lambda: not self.remove(), lambda: f"nothing is left: {self.remove()}", 30)

    def remove(self):
        """The paths that could not be removed."""
        remove_cgroups(self.cgroup)
        shutil.rmtree(self.directory, ignore_errors=True)
        return [str(path) for path in (self.directory, *CGROUPS.glob(f"*/{self.cgroup}")) if path.exists()]
