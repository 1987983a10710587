"""Pods of containerd, made as the kubelet makes them: a sandbox, and one container in it, by CRI.

A command that plays the CNI plugin gives each pod an address that nobody uses; a vNIC comes as in all containers.
"""

import contextlib
import re
import time
import uuid

from harness import cri
from harness.engines import IMAGE, SECONDS, USER, Containerd, processes_with, cmdline
from harness.failure import Failure, need

REFUSED = 125
EXITED = 2
REMOVE_SECONDS = 60
# Of namespaces, and of seccomp's profiles.
OWN_PROCESSES, USUAL_SYSTEM_CALLS = 1, 0
NAMESPACE = "default"
PAUSE = "example.org/freeflow-pause:1"
PLUGIN = """#!/bin/sh
cat >/dev/null
[ "$CNI_COMMAND" = ADD ] || exit 0
nsenter --net="$CNI_NETNS" ip link set lo up
cat <<END
{"cniVersion": "0.3.1", "interfaces": [{"name": "$CNI_IFNAME", "sandbox": "$CNI_NETNS"}],
 "ips": [{"version": "4", "interface": 0, "address": "192.0.2.7/24"}]}
END
"""
SETTINGS = """
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  stream_server_address = "127.0.0.1"
{cdi}  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{directory}/cni"
    conf_dir = "{directory}/cni.d"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
{handlers}"""
HANDLER = """  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{name}]
    runtime_type = "io.containerd.runc.v2"
    container_annotations = ["freeflow.io/*"]
    pod_annotations = ["freeflow.io/*"]
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{name}.options]
      BinaryName = "{program}"
"""
# Handlers of RuntimeClasses, and what an administrator writes for each: a wrapper of one line.
LISTED = '{"annotation": {"networks": ["red", "blue"]}}'


class Pods(Containerd):
    """The words that give a pod its vNIC are the fields of its messages: devices, a handler, annotations."""

    def begin(self):
        self.pods = {}
        self.namespace = "k8s.io"
        super().begin()

    def plugins(self):
        for folder in ("cni", "cni.d", "logs"):
            (self.directory / folder).mkdir()
        for name in ("loopback", "pod"):
            plugin = self.directory / "cni" / name
            plugin.write_text(PLUGIN)
            plugin.chmod(0o755)
        (self.directory / "cni.d/pod.conf").write_text('{"cniVersion": "0.3.1", "name": "pod", "type": "pod"}\n')
        listed = self.directory / "listed.json"
        listed.write_text(LISTED)
        programs = {"freeflow": self.runtime, "freeflow-listed": self.wrapper("listed", "--config", listed)}
        handlers = "".join(HANDLER.format(name=name, program=program) for name, program in programs.items())
        cdi_words = '  enable_cdi = true\n  cdi_spec_dirs = ["/etc/cdi"]\n' if self.folder.name != "docker-20" else ""
        return SETTINGS.format(pause=PAUSE, cdi=cdi_words, directory=self.directory, handlers=handlers)

    def wrapper(self, name, *words):
        path = self.directory / name
        path.write_text(f'#!/bin/sh\nexec {self.runtime} {" ".join(map(str, words))} "$@"\n')
        path.chmod(0o755)
        return path

    def begin_more(self):
        # Its first program is the image's own.
        self.import_root(PAUSE, entrypoint=["/bin/sleep", "infinity"])

    def cri(self, method, message):
        return cri.call(self.socket, method, message)

    def by_cdi(self, device="freeflow.io/net=default"):
        return {"devices": [device]}

    def by_runtime(self, network=None, handler="freeflow-listed"):
        return {"handler": handler, "annotations": {"freeflow.io/network": network} if network else {}}

    def make_pod(self, name, given, words, image, is_root):
        """A container that is created; Refused where the engine or the runtime says no."""
        annotations = cri.text_map(given.get("annotations", {}))
        pod = {1: {1: name, 2: uuid.uuid4().hex, 3: NAMESPACE}, 3: str(self.directory / "logs"), 7: annotations,
               8: {1: self.cgroup, 2: {1: {2: OWN_PROCESSES}}}}
        sandbox = self.cri("RunPodSandbox", {1: pod, 2: given.get("handler", "")})[1][0].decode()
        self.pods[name] = (sandbox, None)
        rights = {5: {1: 0}} if is_root else {1: {2: ["ALL"]}, 5: {1: int(USER)}, 11: 1}
        rights |= {3: {2: OWN_PROCESSES}, 15: {1: USUAL_SYSTEM_CALLS}}
        log = self.log(name)
        log.unlink(missing_ok=True)
        container = {1: {1: name}, 2: {1: image}, 3: list(map(str, words)), 10: annotations, 11: log.name,
                     15: {2: rights}, 17: [{1: device} for device in given.get("devices", ())]}
        created = self.cri("CreateContainer", {1: sandbox, 2: container, 3: pod})[1][0].decode()
        self.pods[name] = (sandbox, created)
        self.cri("StartContainer", {1: created})

    def log(self, name):
        return self.directory / "logs" / f"{name}.log"

    def output(self, name):
        """Lines of the log have a time, a stream and a mark before them."""
        log = self.log(name)
        lines = re.findall(r"^\S+ \S+ ([FP]) (.*)$", log.read_text(), re.M) if log.exists() else []
        return "".join(text + ("\n" if mark == "F" else "") for mark, text in lines)

    def status(self, name):
        return cri.decode(self.cri("ContainerStatus", {1: self.pods[name][1]})[1][0])

    def run(self, name, given, *words, codes=(0,), image=IMAGE, is_root=False):
        try:
            self.make_pod(name, given, words, image, is_root)
            end = time.monotonic() + SECONDS
            while (status := self.status(name)).get(3) != [EXITED]:
                need(time.monotonic() < end, f"the pod {name} runs on:\n{self.output(name)}")
                time.sleep(0.05)
            code, output = status.get(7, [0])[0], self.output(name)
        except cri.Refused as refusal:
            code, output = REFUSED, str(refusal)
        finally:
            self.remove(name)
        need(code in codes, f"the pod {name} gave {code}:\n{output}")
        return output

    def detached(self, name, given, *words, image=IMAGE):
        self.make_pod(name, given, words, image, False)

    def begun(self, name, given, *words, image=IMAGE):
        self.detached(name, given, *words, image=image)
        return Begun(self, name)

    def remove(self, name):
        if name not in self.pods:
            return
        sandbox, _ = self.pods.pop(name)
        # As the kubelet does: until the engine has seen what has died.
        end = time.monotonic() + REMOVE_SECONDS
        for method in ("StopPodSandbox", "RemovePodSandbox"):
            while True:
                try:
                    self.cri(method, {1: sandbox})
                    break
                except cri.Refused:
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.2)

    def names(self):
        return list(self.pods)

    def shim_of(self, name):
        sandbox = self.pods[name][0]
        return next(pid for pid in processes_with(sandbox) if b"containerd-shim" in cmdline(pid))

    def close(self):
        for name in self.names() if hasattr(self, "pods") else ():
            with contextlib.suppress(Failure):
                self.remove(name)
        super().close()


class Begun:
    """A container that runs, as `Running` is a program that does."""

    def __init__(self, pods, name):
        self.pods, self.name = pods, name

    def wait(self, seconds):
        end = time.monotonic() + seconds
        while (status := self.pods.status(self.name)).get(3) != [EXITED]:
            need(time.monotonic() < end, f"the pod {self.name} runs on:\n{self.output()}")
            time.sleep(0.05)
        self.text = self.pods.output(self.name)
        self.pods.remove(self.name)
        return status.get(7, [0])[0]

    def output(self):
        return self.text if hasattr(self, "text") else self.pods.output(self.name)
