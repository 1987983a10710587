"""Network namespaces as a container runtime has them for pods, and calls of CNI plugins as it makes them."""

import contextlib
import json
import os
import pathlib
import subprocess
import time

from harness.failure import need
from harness.processes import Running, run
from harness.settings import PORT

PLUGINS = pathlib.Path("/usr/lib/cni")
SECONDS = 60
UNPRIVILEGED = ("--cap-drop", "all", "--user", "1000", "--security-opt", "no-new-privileges")
LIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")


class Refused(Exception):
    """A plugin's error, as it came."""

    def __init__(self, error):
        super().__init__(f"{error['msg']}: {error['details']}")
        self.code, self.error = error["code"], error


def started(plugin, command, configuration, environment):
    """A call that runs, with its configuration on standard input."""
    process = subprocess.Popen(
        [plugin], env={"PATH": os.environ["PATH"], "CNI_PATH": str(PLUGINS), "CNI_COMMAND": command, **environment},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    # A call that is refused by its environment does not read it; Go's libraries pass over that as well.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(configuration if isinstance(configuration, str) else json.dumps(configuration))
        process.stdin.close()
    process.stdin = None
    return process


def answer_of(process):
    """What a call printed, as JSON; Refused for an error."""
    try:
        output, complaint = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    if process.returncode == 0:
        return json.loads(output) if output.strip() else None
    need(output.strip(), f"the plugin gave exit code {process.returncode} and no error: {complaint}")
    error = json.loads(output)
    need({"cniVersion", "code", "msg", "details"} <= set(error), f"the error lacks a part: {error}")
    raise Refused(error)


class Plugin:
    """`freeflow-cni` of a host, in lists with other plugins."""

    def __init__(self, host):
        self.host = host
        self.directory = host.directory / "cni"
        self.directory.mkdir()
        self.program = self.directory / "freeflow-cni"
        self.program.symlink_to(host.freeflow_path)

    def environment(self, pod=None, **more):
        of_pod = {} if pod is None else {
            "CNI_CONTAINERID": pod.name, "CNI_IFNAME": "eth0", "CNI_NETNS": str(pod.path), "CNI_ARGS": pod.arguments}
        return {"FREEFLOW_RUN_DIR": str(self.host.run_dir), **of_pod, **more}

    def call(self, command, configuration, pod=None, **more):
        return answer_of(started(self.program, command, configuration, self.environment(pod, **more)))

    def path_of(self, kind):
        return self.program if kind == "freeflow-cni" else PLUGINS / kind

    def walk(self, command, plugins, pod, result=None):
        """Calls the plugins of a list as libcni does: for DEL backwards, each with the result of the last ADD."""
        for fields in reversed(plugins) if command == "DEL" else plugins:
            configuration = {"cniVersion": "1.0.0", "name": "pods", **fields}
            if result is not None:
                configuration["prevResult"] = result
            environment = self.environment(pod)
            answer = answer_of(started(self.path_of(fields["type"]), command, configuration, environment))
            result = answer if command == "ADD" else result
        return result


class Pod:
    """A network namespace with a name."""

    count = 0

    def __init__(self, podman, arguments=""):
        Pod.count += 1
        self.podman, self.arguments = podman, arguments
        self.name = f"fft-{os.getpid()}-{Pod.count}"
        self.path = pathlib.Path("/run/netns") / self.name
        run(["ip", "netns", "add", self.name])
        # As runtimes do, by the plugin `loopback`.
        run(["ip", "-n", self.name, "link", "set", "lo", "up"])
        self.running = []

    def inside(self, *words):
        return run(["ip", "netns", "exec", self.name, *words])

    def interfaces(self):
        return json.loads(self.inside("ip", "-json", "address"))

    def addresses(self, interface="eth0"):
        links = (link for link in self.interfaces() if link["ifname"] == interface)
        return [one["local"] for link in links for one in link["addr_info"] if one["family"] == "inet"]

    def container(self, network, *words):
        """The command line of a container of this pod, with the CDI device of a network."""
        return self.podman.command(
            "run", "--rm", *LIMITS, "--device", f"freeflow.io/net={network}", "--network", f"ns:{self.path}", *UNPRIVILEGED,
            "--rootfs", "/:O", *words)

    def run(self, network, *words, codes=(0,)):
        return run(self.container(network, *words), 90, codes=codes)

    def start(self, network, *words):
        self.running.append(running := Running(self.container(network, *words)))
        return running

    def wait_for_port(self, running, port=PORT):
        end = time.monotonic() + SECONDS
        while not any(f":{port:04X} " in line and " 0A " in line
                      for line in self.inside("cat", "/proc/net/tcp", "/proc/net/tcp6").splitlines()):
            need(running.process.poll() is None, f"it ended before it listened:\n{running.output()}")
            need(time.monotonic() < end, f"it does not listen on {port}:\n{running.output()}")
            time.sleep(0.02)

    def close(self):
        for running in self.running:
            running.kill()
        if self.path.exists():
            run(["ip", "netns", "delete", self.name])


@contextlib.contextmanager
def pods(podman, *arguments):
    """Pods with these CNI_ARGS."""
    with contextlib.ExitStack() as stack:
        made = []
        for one in arguments:
            made.append(pod := Pod(podman, one))
            stack.callback(pod.close)
        yield made


def bridge_list(directory, network, subnet):
    """A list of Debian's `bridge` with this plugin behind it, and the bridge's name."""
    name = f"fft{os.getpid()}"
    ipam = {"type": "host-local", "dataDir": str(directory / "ipam"), "ranges": [[{"subnet": subnet}]],
            "routes": [{"dst": "0.0.0.0/0"}]}
    bridge = {"type": "bridge", "bridge": name, "isGateway": True, "ipMasq": False, "ipam": ipam}
    return name, [bridge, {"type": "freeflow-cni", "network": network, "labels": {"tier": "web"}}]
