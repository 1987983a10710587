"""A node of a Kubernetes for tests: containerd 2, a kubelet, Debian's CNI plugins, and a host of FreeFlow."""

import json
import os
import pathlib
import shutil
import signal

from harness import made_images, settings
from harness.engines import PROGRAMS, cmdline, processes_with, wait_until
from harness.failure import Failure, need
from harness.host import Host

IMAGE = "example.org/freeflow-test:1"
PAUSE = "example.org/pause:1"
SOCKET = "/run/containerd/containerd.sock"
CNI_PLUGINS = "/usr/lib/cni"
# Names of services, which the cluster knows where a test wants it.
DNS_SERVICE = "10.96.0.10"
DOMAIN = "cluster.local"

CONTAINERD = """version = 3
root = "{directory}/containerd"
state = "/run/containerd"
[grpc]
address = "{socket}"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "{pause}"
[plugins.'io.containerd.cri.v1.runtime']
# This machine may lack CAP_SYS_RESOURCE, by which a sandbox would get a score below 0.
restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ["{plugins}", "{programs}"]
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.freeflow]
runtime_type = "io.containerd.runc.v2"
container_annotations = ["freeflow.io/*"]
pod_annotations = ["freeflow.io/*"]
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.freeflow.options]
BinaryName = "{runtime}"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.users]
runtime_type = "io.containerd.runc.v2"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.users.options]
BinaryName = "{users}"
"""


class NodeHost(Host):
    """A host of FreeFlow on a machine of its own, with the default run directory."""

    def __init__(self, machine, *up_options):
        self.machine = machine
        super().__init__(*up_options)

    def begin(self):
        super().begin()
        self.run_dir = self.machine.path("/run/freeflow")

    def command(self, *words):
        # The router's own cgroup has its name of the run directory, which other machines of tests have too.
        return self.machine.inside("env", "FREEFLOW_CGROUP_KEEP=all", self.freeflow_path, *words)

    def router_pid(self):
        return self.machine.pid_here(super().router_pid())

    def is_up(self):
        return self.router_pid() is not None


class Node:
    """`host` is what `freeflow up` makes there, when it is first asked for: never where FreeFlow's DaemonSet runs."""

    def __init__(self, kubernetes, machine, number):
        self.kubernetes, self.machine, self.number = kubernetes, machine, number
        self.name = f"node{number}"
        self.directory = machine.directory
        self.made_host, self.up_options = None, ()
        need(pathlib.Path(CNI_PLUGINS, "bridge").exists(), "containernetworking-plugins is missing: scripts/install-deps kubernetes")
        self.write_cni(self.bridge())
        self.start_containerd()
        self.import_images()
        machine.make_cgroups()
        kubernetes.authority.issue(self.name, f"/O=system:nodes/CN=system:node:{self.name}", [machine.address], [self.name])
        self.credentials = kubernetes.authority.kubeconfig(self.name, kubernetes.server)
        self.start_kubelet()

    @property
    def host(self):
        if self.made_host is None:
            self.made_host = NodeHost(self.machine, *self.up_options)
        return self.made_host

    # ---- containerd

    @property
    def runc_with_users(self):
        """A newer one than Debian's, for pods with user namespaces."""
        return self.kubernetes.programs / "runc" / "runc"

    @property
    def pod_addresses(self):
        return f"10.88.{self.number}.0/24"

    def bridge(self):
        addresses = {"type": "host-local", "ranges": [[{"subnet": self.pod_addresses}]], "routes": [{"dst": "0.0.0.0/0"}]}
        return {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipam": addresses}

    def write_cni(self, *plugins):
        folder = self.machine.path("/etc/cni/net.d")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "10-pods.conflist").write_text(json.dumps({"cniVersion": "1.0.0", "name": "pods", "plugins": plugins}))

    def start_containerd(self):
        file = self.directory / "containerd.toml"
        file.write_text(CONTAINERD.format(directory=self.directory, socket=SOCKET, pause=PAUSE, plugins=CNI_PLUGINS,
                                          programs=settings.DIST / "bin", runtime=settings.DIST / "bin" / "freeflow-runtime", users=self.runc_with_users))
        self.machine.start("containerd", "containerd", "--config", file)

        def answers():
            self.machine.need_running("containerd")
            return "Server:" in self.ctr("version", codes=(0, 1))
        wait_until(answers, lambda: f"containerd answers\n{self.machine.log('containerd')}")

    def stop_containerd(self, number=signal.SIGTERM):
        self.machine.stop("containerd", number)

    def ctr(self, *words, codes=(0,)):
        """What it prints, but for its warnings."""
        output = self.machine.call("ctr", "--address", SOCKET, "--namespace", "k8s.io", *words, codes=codes)
        return "".join(line for line in output.splitlines(True) if not line.startswith("time="))

    def import_images(self):
        pause = self.directory / "pause"
        for folder in made_images.FOLDERS:
            (pause / folder).mkdir(parents=True, exist_ok=True)
        shutil.copy(shutil.which("busybox"), pause / "bin" / "sleep")
        self.import_image(PAUSE, pause, {"Entrypoint": ["/bin/sleep", "1000000000"], "Env": ["PATH=/bin"]})
        root = made_images.make_root(self.directory / "image", *PROGRAMS)
        self.import_image(IMAGE, root, {"User": "1000", "Env": ["PATH=/bin"]})

    def import_image(self, name, root, config):
        file = self.directory / "image.tar"
        made_images.archive(root, file, config, name)
        self.ctr("images", "import", file)
        file.unlink()

    def kill_shim(self, pod_name):
        """Of containerd, for all containers of the pod; their programs go on until somebody ends them."""
        uid = self.kubernetes.get("pod", pod_name)["metadata"]["uid"]
        for line in self.ctr("containers", "ls", "-q").split():
            labels = json.loads(self.ctr("containers", "info", line)).get("Labels") or {}
            if labels.get("io.kubernetes.pod.uid") == uid and labels.get("io.cri-containerd.kind") == "sandbox":
                shims = [pid for pid in processes_with(line) if b"containerd-shim" in cmdline(pid)]
                need(len(shims) == 1, f"{len(shims)} shims of {pod_name}")
                return os.kill(shims[0], signal.SIGKILL)
        raise Failure(f"containerd has no sandbox of {pod_name}")

    # ---- the kubelet

    def kubelet_settings(self):
        path = self.kubernetes.authority.path
        authentication = {"anonymous": {"enabled": False}, "webhook": {"enabled": True}, "x509": {"clientCAFile": str(path("ca.pem"))}}
        # Other tests may have filled this machine's disk.
        never = ("memory.available", "nodefs.available", "nodefs.inodesFree", "imagefs.available", "imagefs.inodesFree")
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": f"unix://{SOCKET}", "cgroupDriver": "cgroupfs", "cgroupRoot": f"/{self.machine.cgroup}",
            "failCgroupV1": False, "failSwapOn": False, "enforceNodeAllocatable": [], "makeIPTablesUtilChains": False,
            "authentication": authentication, "authorization": {"mode": "Webhook"}, "tlsCertFile": str(path(f"{self.name}.pem")),
            "tlsPrivateKeyFile": str(path(f"{self.name}.key")), "resolvConf": "",
            "clusterDNS": [DNS_SERVICE], "clusterDomain": DOMAIN,
            "volumePluginDir": str(self.directory / "volume-plugins"), "evictionHard": {name: "0%" for name in never},
            "imageGCHighThresholdPercent": 100, "nodeStatusUpdateFrequency": "2s", "nodeStatusReportFrequency": "2s",
            "syncFrequency": "10s", "kubeAPIQPS": 100, "kubeAPIBurst": 200}

    def start_kubelet(self):
        file = self.directory / "kubelet.json"
        file.write_text(json.dumps(self.kubelet_settings()))
        self.machine.start("kubelet", "kubelet", "--config", file, "--kubeconfig", self.credentials,
                           f"--hostname-override={self.name}", f"--node-ip={self.machine.address}")

    def stop_kubelet(self, number=signal.SIGTERM):
        self.machine.stop("kubelet", number)

    def ready(self):
        """The node's condition of that kind, or nothing."""
        self.machine.need_running("kubelet")
        nodes = [node for node in self.kubernetes.get("nodes", namespace=None) if node["metadata"]["name"] == self.name]
        rows = [row for node in nodes for row in node["status"].get("conditions", [])]
        return next((row for row in rows if row["type"] == "Ready"), {})

    def wait_for_ready(self):
        def is_ready():
            return self.ready().get("status") == "True" and self.kubernetes.get("serviceaccounts")
        wait_until(is_ready, lambda: f"the node is ready\n{self.machine.log('kubelet')}")

    def wait_for_new_heartbeat(self):
        """Until the kubelet has said again that the node is ready."""
        before = self.ready()["lastHeartbeatTime"]
        wait_until(lambda: self.ready()["lastHeartbeatTime"] != before, lambda: f"the kubelet answers\n{self.machine.log('kubelet')}")
        self.wait_for_ready()

    def close(self):
        if self.made_host is not None:
            self.made_host.close()
