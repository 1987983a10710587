"""DRA as older clusters have it: the API server's objects and the kubelet's calls of version v1beta1 alone.

Both are Kubernetes' own, of the version that is here; `older_kubernetes_inside.py` hides their newer versions from the agent.
"""

import json
import re

import pytest

from harness import kubernetes_freeflow, settings
from harness.engines import wait_until
from harness.failure import need
from harness.kubernetes import Kubernetes
from harness.kubernetes_freeflow import NAMESPACE, slices
from harness.kubernetes_pods import SLEEP, ByClaim, between_two, vnics, wait_for_no_vnic

API = "resource.k8s.io/v1beta1"
DIRECTORY = "/var/lib/older"
PORT = 8001
WRITE = ["ib_write_bw", "-F", "-n", "200"]


@pytest.fixture(scope="module")
def kubernetes():
    with Kubernetes(api_options=[f"--runtime-config={API}=true"]) as kubernetes:
        yield kubernetes


class ByOlderClaim(ByClaim):
    """The same claim as v1beta1 has it: what is `exactly` later stands in the request itself."""

    def objects(self, *words, **spec):
        template, *others = super().objects(*words, **spec)
        template["apiVersion"] = API
        for request in template["spec"]["spec"]["devices"]["requests"]:
            request |= request.pop("exactly")
        return [template, *others]


@pytest.fixture(scope="module")
def way(kubernetes):
    """The chart without its DaemonSet's pods and without its class, and the agent by hand, with its service account."""
    kubernetes.node.host.status()
    kubernetes_freeflow.apply_chart(kubernetes, "node.nodeSelector={none: here}", "deviceClass.enabled=false")
    kubernetes_freeflow.wait_for_controller(kubernetes)
    rule = 'device.driver == "freeflow.io"'
    kubernetes.apply({"apiVersion": API, "kind": "DeviceClass", "metadata": {"name": "freeflow"},
                      "spec": {"selectors": [{"cel": {"expression": rule}}]}})
    start_agent(kubernetes)
    wait_until(lambda: slices(kubernetes), lambda: f"the node offers vNICs:\n{kubernetes.machine.log('agent')}")
    way = ByOlderClaim(kubernetes)
    way.prepare_networks()
    return way


def start_agent(kubernetes):
    machine, path = kubernetes.machine, kubernetes.authority.path
    for name in ("plugins", "plugins_registry"):
        machine.path(f"{DIRECTORY}/{name}").mkdir(parents=True)
    token = path("agent.token")
    bound = ("--bound-object-kind=Node", f"--bound-object-name={kubernetes.node.name}")
    token.write_text(kubernetes.kubectl("--namespace", NAMESPACE, "create", "token", "freeflow-node", "--duration=2h", *bound))
    machine.start("older", "/usr/bin/python3", settings.PROGRAMS / "older_kubernetes_inside.py", PORT, kubernetes.server, path("ca.pem"),
                  token, "/var/lib/kubelet/plugins_registry/freeflow.io-reg.sock", f"{DIRECTORY}/plugins_registry/freeflow.io-reg.sock")
    config = path("older.kubeconfig")
    config.write_text(json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "older", "users": [],
        "clusters": [{"name": "older", "cluster": {"server": f"http://127.0.0.1:{PORT}"}}],
        "contexts": [{"name": "older", "context": {"cluster": "older"}}]}))
    machine.start("agent", settings.DIST / "bin" / "freeflow-kubernetes", "--kubeconfig", config, "node", "--node-name", kubernetes.node.name,
                  "--freeflow", settings.DIST / "bin" / "freeflow", "--kubelet-dir", DIRECTORY, "--no-device-plugin")


@pytest.fixture(autouse=True)
def no_pods_left(kubernetes, way):
    yield
    kubernetes.delete("pods", "--all")
    kubernetes.delete("events", "--all")
    wait_for_no_vnic(kubernetes)
    wait_until(lambda: not list(kubernetes.machine.path("/var/run/cdi").glob("freeflow-claim-*")), "the claims' CDI files are gone")


def test_devices_are_published_as_v1beta1(kubernetes):
    requests = kubernetes.machine.log("older", 1000)
    need(re.search(rf"PATCH /apis/{API}/resourceslices/\S+ 20", requests), requests)
    need([len(row["spec"]["devices"]) for row in slices(kubernetes)] == [128], slices(kubernetes))
    need(f"claims are those of {API}" in kubernetes.machine.log("agent"), kubernetes.machine.log("agent"))


def test_perftest_between_two_pods(kubernetes, way):
    output = between_two(kubernetes, way, WRITE, [*WRITE, "{ip}"], network="red")
    need(re.search(r"^ 65536 +200 ", output, re.M), output)
    requests = kubernetes.machine.log("older", 1000)
    need(re.search(rf"GET /apis/{API}/namespaces/default/resourceclaims/\S+ 200", requests), requests)


def test_an_unknown_network_is_in_the_pods_events(kubernetes, way):
    kubernetes.apply(*way.objects("one", SLEEP, "blue"))
    kubernetes.wait_for_event("one", "blue")
    need(not vnics(kubernetes), "there is a vNIC")


def test_the_kubelet_restarts(kubernetes, way):
    kubernetes.apply(*way.objects("one", SLEEP, "red"))
    kubernetes.wait_for_ready("one")
    kubernetes.node.stop_kubelet()
    kubernetes.node.start_kubelet()
    kubernetes.node.wait_for_new_heartbeat()
    kubernetes.apply(*way.objects("two", SLEEP, "red"))
    kubernetes.wait_for_ready("two")
    need(len(vnics(kubernetes)) == 2, vnics(kubernetes))
