"""Pods that have vNICs: the ways in which they get them, and what tests do with them."""

import json

from harness.engines import wait_until
from harness.failure import need
from harness.kubernetes import pod

RED = "apiVersion: freeflow.io/v1\nkind: Network\nmetadata: {name: red}\nspec: {cidrs: [10.50.0.0/24]}\n"


class ByRuntimeClass:
    """The handler of the pod's RuntimeClass is `freeflow-runtime`, an annotation names the network."""

    def __init__(self, kubernetes):
        self.kubernetes = kubernetes

    def prepare(self):
        file = self.kubernetes.directory / "red.yaml"
        file.write_text(RED)
        self.kubernetes.node.host.freeflow("apply", "-f", file)
        # Names that pods may give: none at first.
        settings = self.kubernetes.node.machine.path("/etc/freeflow/runtime.json")
        settings.parent.mkdir(exist_ok=True)
        settings.write_text(json.dumps({"annotation": {"networks": ["red", "blue"]}}))
        runtime_class = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "freeflow"}, "handler": "freeflow"}
        self.kubernetes.apply(runtime_class)

    def objects(self, name, words, network=None, **spec):
        made = pod(name, words, runtimeClassName="freeflow", **spec)
        if network:
            made["metadata"]["annotations"] = {"freeflow.io/network": network}
        return [made]

    def full_name(self, network):
        return network

    def wait_until_ready(self):
        """Nothing of this way runs besides the router."""

    def remove(self):
        self.kubernetes.delete("runtimeclass", "freeflow", namespace=None)
        self.kubernetes.node.host.freeflow("delete", "network", "red")


WAYS = {"runtime": ByRuntimeClass}


def vnics(kubernetes):
    return kubernetes.node.host.status()["vnics"]


def wait_for_no_vnic(kubernetes):
    wait_until(lambda: not vnics(kubernetes), lambda: f"the vNICs are gone: {vnics(kubernetes)}")


def address_of_new(kubernetes, before):
    """Of the container that has come since."""
    known = {row["ip"] for row in before}
    rows = [row for row in kubernetes.node.host.containers() if row["ip"] not in known]
    need(len(rows) == 1, f"{len(rows)} containers are new instead of one: {rows}")
    return rows[0]["ip"]


def listens(kubernetes, name):
    """Whether something in the pod listens: by TCP, or by rdma_cm."""
    if " 0A " in kubernetes.exec(name, "cat", "/proc/net/tcp", "/proc/net/tcp6"):
        return True
    return kubernetes.node.host.status()["cm"]["listener_count"] > 0


def between_two(kubernetes, way, server, client):
    """A server in one pod and a client, which gets its address, in another; what the client printed."""
    before = kubernetes.node.host.containers()
    kubernetes.apply(*way.objects("server", server))
    kubernetes.wait_for_phase("server", "Running")
    address = address_of_new(kubernetes, before)
    wait_until(lambda: listens(kubernetes, "server"), "the server listens")
    kubernetes.apply(*way.objects("client", [word.replace("{ip}", address) for word in client]))
    kubernetes.wait_for_phase("client", "Succeeded")
    kubernetes.wait_for_phase("server", "Succeeded")
    return kubernetes.logs("client")
