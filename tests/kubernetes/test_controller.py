"""The controller in its pod, with the rights that the chart gives it, before a real API server and a real router."""

import pytest

from harness import kubernetes_freeflow, settings
from harness.engines import wait_until
from harness.failure import need
from harness.kubernetes_freeflow import NAMESPACE, condition, declared, wait_for_condition

AGENT = f"system:serviceaccount:{NAMESPACE}:freeflow-node"
CONTROLLER = f"system:serviceaccount:{NAMESPACE}:freeflow-controller"
RED = declared("Network", "red", "default", cidrs=["10.51.0.0/24"])


@pytest.fixture(scope="module", autouse=True)
def red(kubernetes):
    kubernetes.node.host.status()
    kubernetes_freeflow.apply_chart(kubernetes, f"node.command={settings.DIST}/bin/freeflow")
    kubernetes_freeflow.wait_for_controller(kubernetes)
    kubernetes.apply(RED)
    wait_for_condition(kubernetes, "network", "red", "Enforced")


def networks(kubernetes):
    return kubernetes.node.host.freeflow("get", "networks")


def test_objects_become_freeflows(kubernetes):
    kubernetes.apply(declared("ClusterNetwork", "shared", cidrs=["10.55.0.0/24"], allowedNamespaces=["*"]))
    text = wait_for_condition(kubernetes, "clusternetwork", "shared", "Enforced", namespace=None)
    need("1 of 1" in text, text)
    need("k8s.default.red" in networks(kubernetes) and "k8s._.shared" in networks(kubernetes), networks(kubernetes))
    kubernetes.delete("clusternetworks.freeflow.io", "shared", namespace=None)
    need("k8s._.shared" not in networks(kubernetes), networks(kubernetes))


def test_a_refused_network_says_why_and_stops_no_other(kubernetes):
    kubernetes.apply(declared("Network", "overlapping", "default", cidrs=["10.51.0.0/25"]),
                     declared("Network", "good", "default", cidrs=["10.56.0.0/24"]))
    wait_for_condition(kubernetes, "network", "good", "Accepted")
    text = wait_for_condition(kubernetes, "network", "overlapping", "Accepted", "False")
    need("overlaps" in text and "overlaps" in kubernetes.wait_for_event("overlapping", "Invalid: .*"), text)
    kubernetes.delete("networks.freeflow.io", "overlapping", "good")
    need("good" not in networks(kubernetes), networks(kubernetes))


def test_a_spec_that_changes_is_followed(kubernetes):
    kubernetes.apply(RED | {"spec": {"cidrs": ["10.51.0.0/24"], "access": "deny"}})
    wait_until(lambda: "deny" in networks(kubernetes), lambda: f"red denies:\n{networks(kubernetes)}")
    kubernetes.apply(RED)


def test_freeflow_itself_does_not_change_what_kubernetes_declares(kubernetes):
    output = kubernetes.node.host.freeflow("delete", "network", "k8s.default.red", codes=(3,))
    need("managed by kubernetes" in output and "kubectl edit networks.freeflow.io red -n default" in output, output)


def test_the_controller_is_killed(kubernetes):
    kubernetes.delete("pods", "--selector", "app.kubernetes.io/component=controller", namespace=NAMESPACE)
    kubernetes.apply(declared("Network", "later", "default", cidrs=["10.57.0.0/24"]))
    wait_for_condition(kubernetes, "network", "later", "Enforced")
    kubernetes.delete("networks.freeflow.io", "later")


def test_the_api_server_restarts(kubernetes):
    kubernetes.machine.stop("kube-apiserver")
    kubernetes.start_api_server()
    kubernetes.wait_for_api_server()
    kubernetes.apply(declared("Network", "after", "default", cidrs=["10.58.0.0/24"]))
    wait_for_condition(kubernetes, "network", "after", "Enforced")
    need(condition(kubernetes, "network", "red", "Accepted")["status"] == "True", "red is lost")
    kubernetes.delete("networks.freeflow.io", "after")


@pytest.mark.parametrize("account, allowed, refused", [
    (AGENT, ["patch resourceslices", "get resourceclaims"],
     ["get secrets", "create pods", "update nodes", "patch networks.freeflow.io", "delete resourceclaims", "list pods",
      "list resourceclaims", "update resourceslices", "list networks.freeflow.io"]),
    (CONTROLLER, ["patch networks.freeflow.io/status", "list accessrules.freeflow.io"],
     ["get secrets", "list pods", "create networks.freeflow.io", "delete networks.freeflow.io", "patch resourceslices"]),
], ids=["agent", "controller"])
def test_rights_of_service_accounts(kubernetes, account, allowed, refused):
    for words, answer in [*((each, "yes") for each in allowed), *((each, "no") for each in refused)]:
        verb, resource = words.split()
        more = ["--subresource=status"] if resource.endswith("/status") else []
        resource = resource.removesuffix("/status")
        output = kubernetes.kubectl("auth", "can-i", verb, resource, "--all-namespaces", f"--as={account}", *more, codes=(0, 1))
        need(output.strip().splitlines()[-1] == answer, f"{account} {words}: {output}")
