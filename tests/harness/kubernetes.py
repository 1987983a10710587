"""Kubernetes for tests: etcd, API server, controllers and scheduler, and nodes with containerd 2, a kubelet and a host of
FreeFlow, each on a machine of its own (`Machine`), the control plane on the first node's."""

import contextlib
import json
import os
import pathlib
import re

from harness import settings
from harness.engines import wait_until
from harness.failure import Failure, need
from harness.kubernetes_certificates import Authority
from harness.kubernetes_node import DNS_SERVICE, DOMAIN, IMAGE, Node
from harness.machine import SECONDS, Machine
from harness.processes import run
from harness.programs import require_commands, require_root

ADDRESSES = "10.77.0."
SERVICES = "10.96.0.0/16"
# Addresses of services inside of the cluster: of the first machine itself, in place of kube-proxy's translation.
API_SERVICE = "10.96.0.1"
API_PORT = 443
ETCD = "http://127.0.0.1:2379"


def installed():
    """The folder of the programs, which are built once, before the tests."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    folder = pathlib.Path(os.environ.get("FREEFLOW_KUBERNETES") or cache / "freeflow" / "kubernetes")
    run([settings.ROOT / "scripts" / "install-kubernetes", "--check", folder])
    return folder


class Kubernetes:
    """The cluster; `node` is its first node. The API server gets these options besides."""

    def __init__(self, nodes=1, api_options=()):
        require_root()
        require_commands("openssl", "setpriv", "unshare", "nsenter", "runc", "ip", "busybox")
        self.programs, self.api_options = installed(), api_options
        self.machines, self.nodes = [], []
        self.has_freeflow = False
        try:
            self.machine = self.add_machine()
            self.directory = self.machine.directory
            self.server = f"https://{self.machine.address}:{API_PORT}"
            self.authority = Authority(self.directory / "pki")
            self.admin = self.credentials("admin", "/O=system:masters/CN=admin")
            self.start_control_plane()
            for number in range(1, nodes + 1):
                self.nodes.append(Node(self, self.machine if number == 1 else self.add_machine(), number))
            self.connect_pods()
            for node in self.nodes:
                node.wait_for_ready()
            self.node = self.nodes[0]
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def add_machine(self):
        paths = [self.programs / name for name in ("kubernetes", "containerd", "etcd", "helm")]
        first = self.machines[0] if self.machines else None
        self.machines.append(machine := Machine(f"{ADDRESSES}{len(self.machines) + 1}", paths, first))
        for service in (API_SERVICE, DNS_SERVICE):
            # Of other machines by way of the first one.
            route = ["address", "add", f"{service}/32", "dev", "lo"] if first is None else ["route", "add", service, "via", first.address]
            machine.call("ip", *route)
        return machine

    def connect_pods(self):
        """Routes to other nodes' pods, in place of a plugin for many nodes."""
        for node in self.nodes:
            for other in self.nodes:
                if other is not node:
                    node.machine.call("ip", "route", "add", other.pod_addresses, "via", other.machine.address)

    def start_dns(self):
        """Services have names, as far as tests need them."""
        self.machine.start("dns", "/usr/bin/python3", settings.PROGRAMS / "kube_dns_inside.py",
                           DNS_SERVICE, DOMAIN, self.admin)

    def credentials(self, name, subject):
        """The kubeconfig file of a client with a certificate."""
        self.authority.issue(name, subject)
        return self.authority.kubeconfig(name, self.server)

    # ---- the control plane

    def start_control_plane(self):
        self.authority.issue("server", "/CN=kube-apiserver", [self.machine.address, API_SERVICE, "127.0.0.1"],
                             ["kubernetes", "kubernetes.default", "kubernetes.default.svc"])
        self.authority.issue("kubelet-client", "/O=system:masters/CN=kube-apiserver-kubelet-client")
        self.machine.start("etcd", "etcd", "--data-dir", self.directory / "etcd", "--listen-client-urls", ETCD,
                           "--advertise-client-urls", ETCD, "--unsafe-no-fsync")
        self.start_api_server()
        self.wait_for_api_server()
        key = ["--service-account-private-key-file", self.authority.path("accounts.key"), "--root-ca-file", self.authority.path("ca.pem")]
        for program, more in (("kube-controller-manager", ["--use-service-account-credentials", *key]), ("kube-scheduler", [])):
            config = self.credentials(program, f"/CN=system:{program}")
            self.machine.start(program, program, "--kubeconfig", config, "--authentication-kubeconfig", config,
                               "--authorization-kubeconfig", config, "--leader-elect=false", *more)

    def start_api_server(self):
        path = self.authority.path
        accounts = ["--service-account-issuer", "https://kubernetes.default.svc", "--service-account-key-file", path("accounts.pub"),
                    "--service-account-signing-key-file", path("accounts.key")]
        kubelet = ["--kubelet-preferred-address-types=InternalIP", "--kubelet-client-certificate", path("kubelet-client.pem"),
                   "--kubelet-client-key", path("kubelet-client.key"), "--kubelet-certificate-authority", path("ca.pem")]
        self.machine.start(
            "kube-apiserver", "kube-apiserver", "--etcd-servers", ETCD, "--authorization-mode=Node,RBAC", "--allow-privileged",
            "--client-ca-file", path("ca.pem"), "--tls-cert-file", path("server.pem"), "--tls-private-key-file", path("server.key"),
            f"--secure-port={API_PORT}", f"--advertise-address={self.machine.address}", "--service-cluster-ip-range", SERVICES,
            "--enable-admission-plugins=NodeRestriction", *accounts, *kubelet, *self.api_options)

    def wait_for_api_server(self):
        def is_ready():
            self.machine.need_running("kube-apiserver")
            return self.kubectl("get", "--raw", "/readyz", codes=(0, 1)).strip() == "ok"
        wait_until(is_ready, lambda: f"the API server is ready\n{self.machine.log('kube-apiserver')}")

    # ---- kubectl

    def kubectl(self, *words, codes=(0,), seconds=SECONDS, config=None):
        return self.machine.call("kubectl", "--kubeconfig", config or self.admin, *words, codes=codes, seconds=seconds)

    def get(self, kind, name=None, namespace="default"):
        """The object, or all of a kind in a namespace (`None`: of all namespaces, or of none)."""
        where = ["--namespace", namespace] if namespace else ["--all-namespaces"] if name is None else []
        found = json.loads(self.kubectl("get", kind, *([name] if name else []), *where, "-o", "json"))
        return found if name else found["items"]

    def apply(self, *objects, codes=(0,), words=(), config=None):
        path = self.directory / "applied.json"
        path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
        return self.kubectl("apply", *words, "-f", path, codes=codes, config=config)

    def delete(self, kind, *names, namespace="default", words=("--wait=true",)):
        where = ["--namespace", namespace] if namespace else []
        return self.kubectl("delete", kind, *names, *where, "--ignore-not-found", *words)

    def events(self, name, namespace="default"):
        """The messages of an object's events."""
        rows = [row for row in self.get("events", namespace=namespace) if row["involvedObject"]["name"] == name]
        return "\n".join(f"{row['reason']}: {row['message']}" for row in rows)

    def wait_for_event(self, name, pattern, namespace="default", seconds=SECONDS):
        found = wait_until(lambda: re.search(pattern, self.events(name, namespace)),
                           lambda: f"an event of {name} has {pattern}:\n{self.describe_pod(name, namespace)}", seconds)
        return found[0]

    def describe_pod(self, name, namespace="default"):
        with contextlib.suppress(Failure):
            status = self.get("pod", name, namespace)["status"]
            return f"{json.dumps(status, indent=1)}\n{self.events(name, namespace)}"
        return "there is no such pod"

    def wait_for_phase(self, name, phase, namespace="default", seconds=SECONDS):
        def is_there():
            now = self.get("pod", name, namespace)["status"].get("phase")
            need(now == phase or now not in ("Failed", "Succeeded"),
                 f"the pod {name} is {now}:\n{self.describe_pod(name, namespace)}\n{self.logs(name, namespace)}")
            return now == phase
        wait_until(is_there, lambda: f"the pod {name} is {phase}:\n{self.describe_pod(name, namespace)}", seconds)

    def wait_for_ready(self, name, namespace="default", seconds=SECONDS):
        def is_ready():
            conditions = self.get("pod", name, namespace)["status"].get("conditions", [])
            return any(row["type"] == "Ready" and row["status"] == "True" for row in conditions)
        wait_until(is_ready, lambda: f"the pod {name} is ready:\n{self.describe_pod(name, namespace)}", seconds)

    def wait_for_restart(self, name, namespace="default", count=1):
        def has_restarted():
            rows = self.get("pod", name, namespace)["status"].get("containerStatuses", [])
            return any(row["restartCount"] >= count for row in rows)
        wait_until(has_restarted, lambda: f"a container of {name} restarts:\n{self.describe_pod(name, namespace)}")

    def exec(self, name, *words, namespace="default", container="main", codes=(0,)):
        return self.kubectl("exec", "--namespace", namespace, "--container", container, name, "--", *words, codes=codes)

    def logs(self, name, namespace="default", words=()):
        return self.kubectl("logs", "--namespace", namespace, name, *words, codes=(0, 1))

    # ---- the end

    def close(self):
        for node in self.nodes:
            node.close()
        for machine in reversed(self.machines):
            machine.close()


def pod(name, command, *, namespace="default", image=IMAGE, labels=None, container=None, **spec):
    """A pod of one unprivileged container."""
    security = {"runAsUser": 1000, "runAsNonRoot": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]},
                "seccompProfile": {"type": "RuntimeDefault"}}
    one = {"name": "main", "image": image, "imagePullPolicy": "Never", "command": list(command), "securityContext": security}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": namespace, "labels": labels or {}},
            "spec": {"restartPolicy": "Never", "automountServiceAccountToken": False, "terminationGracePeriodSeconds": 1,
                     "enableServiceLinks": False, "containers": [one | (container or {})], **spec}}
