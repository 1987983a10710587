"""Pods that have vNICs: the ways in which they get them, and what tests do with them."""

import json

from harness import kubernetes_freeflow
from harness.engines import wait_until
from harness.failure import need
from harness.kubernetes import pod

SLEEP = ["sleep", "600"]


class Way:
    """How pods get their vNICs: `objects` gives a pod and what it needs besides; `network` is `red`, which is there, or
    another one that is not."""

    # In a pod's events while the router is down.
    DOWN = "router|freeflow up"

    def __init__(self, kubernetes):
        self.kubernetes = kubernetes

    def prepare(self):
        pass

    def wait_until_ready(self):
        pass

    def remove(self):
        pass

    def full_name(self, network):
        """FreeFlow's name of it."""
        return network

    def declare(self, name="red", cidr="10.50.0.0/24", **more):
        """By hand, on the host."""
        network = {"apiVersion": "freeflow.io/v1", "kind": "Network", "metadata": {"name": name}, "spec": {"cidrs": [cidr], **more}}
        file = self.kubernetes.directory / "network.json"
        file.write_text(json.dumps(network))
        self.kubernetes.node.host.freeflow("apply", "-f", file)


class ByRuntimeClass(Way):
    """The handler of the pod's RuntimeClass is `freeflow-runtime`, an annotation names the network."""

    CLASS = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "freeflow"}, "handler": "freeflow"}

    def prepare(self):
        self.declare()
        # Names that pods may give: none at first.
        settings = self.kubernetes.node.machine.path("/etc/freeflow/runtime.json")
        settings.parent.mkdir(exist_ok=True)
        settings.write_text(json.dumps({"annotation": {"networks": ["red", "blue"]}}))
        self.kubernetes.apply(self.CLASS)

    def objects(self, name, words, network=None, **spec):
        made = pod(name, words, runtimeClassName="freeflow", **spec)
        if network:
            made["metadata"]["annotations"] = {"freeflow.io/network": network}
        return [made]

    def remove(self):
        self.kubernetes.delete("runtimeclass", "freeflow", namespace=None)
        self.kubernetes.node.host.freeflow("delete", "network", "red")


class ByClaim(Way):
    """A DRA claim, and Networks of the namespace."""

    RED = {"apiVersion": "freeflow.io/v1alpha1", "kind": "Network", "metadata": {"name": "red", "namespace": "default"},
           "spec": {"cidrs": ["10.51.0.0/24"]}}

    def prepare(self):
        kubernetes_freeflow.install_once(self.kubernetes)
        self.prepare_networks()

    def prepare_networks(self):
        self.kubernetes.apply(self.RED)
        kubernetes_freeflow.wait_for_condition(self.kubernetes, "network", "red", "Enforced")

    def objects(self, name, words, network=None, namespace="default", **spec):
        template = claim_template(f"vnic-{network or 'default'}", {"network": network} if network else None, namespace)
        claim = {"name": "rdma", "resourceClaimTemplateName": template["metadata"]["name"]}
        container = {"resources": {"claims": [{"name": "rdma"}]}}
        return [template, pod(name, words, namespace=namespace, container=container, resourceClaims=[claim], **spec)]

    def full_name(self, network):
        return f"k8s.default.{network}"

    def remove(self):
        self.kubernetes.delete("network.freeflow.io", "red")
        self.kubernetes.delete("resourceclaimtemplates", "--all")


class ByDevicePlugin(Way):
    """A resource of the device plugin: `freeflow.io/vnic`, or of a network that the administrator has listed."""

    DOWN = "router|freeflow up|Insufficient"

    def prepare(self):
        kubernetes_freeflow.install_once(self.kubernetes)
        self.wait_until_ready()

    def objects(self, name, words, network=None, **spec):
        resource = f"freeflow.io/net-{self.full_name(network)}" if network else "freeflow.io/vnic"
        return [pod(name, words, container={"resources": {"limits": {resource: "1"}}}, **spec)]

    def full_name(self, network):
        return kubernetes_freeflow.LISTED if network == "red" else network

    def wait_until_ready(self):
        def allocatable():
            resources = self.kubernetes.get("node", self.kubernetes.node.name, None)["status"]["allocatable"]
            return all(int(resources.get(name, 0)) for name in ("freeflow.io/vnic", f"freeflow.io/net-{kubernetes_freeflow.LISTED}"))
        wait_until(allocatable, lambda: f"the node has vNICs to give:\n{kubernetes_freeflow.logs(self.kubernetes)}")


WAYS = {"runtime": ByRuntimeClass, "claim": ByClaim, "plugin": ByDevicePlugin}


def claim_template(name, parameters=None, namespace="default", device_class="freeflow"):
    devices = {"requests": [{"name": "vnic", "exactly": {"deviceClassName": device_class}}]}
    if parameters is not None:
        wanted = {"apiVersion": "freeflow.io/v1alpha1", "kind": "VnicParameters"} | parameters
        devices["config"] = [{"requests": ["vnic"], "opaque": {"driver": "freeflow.io", "parameters": wanted}}]
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate", "metadata": {"name": name, "namespace": namespace},
            "spec": {"spec": {"devices": devices}}}


def vnics(kubernetes):
    """Of all nodes."""
    return [vnic for node in kubernetes.nodes for vnic in node.host.status()["vnics"]]


def wait_for_no_vnic(kubernetes):
    wait_until(lambda: not vnics(kubernetes), lambda: f"the vNICs are gone: {vnics(kubernetes)}")


def at_node(node):
    """Of a pod's spec: where it runs."""
    return {"nodeSelector": {"kubernetes.io/hostname": node.name}}


def address_of_new(kubernetes, before):
    """Of the container that has come since."""
    known = {row["ip"] for row in before}
    rows = [row for row in kubernetes.node.host.containers() if row["ip"] not in known]
    need(len(rows) == 1, f"{len(rows)} containers are new instead of one: {rows}")
    return rows[0]["ip"]


def listens(kubernetes, name, **where):
    """Whether something in the pod listens: by TCP, or by rdma_cm."""
    if " 0A " in kubernetes.exec(name, "cat", "/proc/net/tcp", "/proc/net/tcp6", **where):
        return True
    return kubernetes.node.host.status()["cm"]["listener_count"] > 0


def between_two(kubernetes, way, server, client, client_at=None, network=None):
    """A server in one pod and a client, which gets its address, in another; what the client printed. Both are on the first
    node, but for a client that is at another one."""
    before = kubernetes.node.host.containers()
    kubernetes.apply(*way.objects("server", server, network, **at_node(kubernetes.node)))
    kubernetes.wait_for_phase("server", "Running")
    address = address_of_new(kubernetes, before)
    wait_until(lambda: listens(kubernetes, "server"), "the server listens")
    words = [word.replace("{ip}", address) for word in client]
    kubernetes.apply(*way.objects("client", words, network, **at_node(client_at or kubernetes.node)))
    kubernetes.wait_for_phase("client", "Succeeded")
    kubernetes.wait_for_phase("server", "Succeeded")
    return kubernetes.logs("client")
