"""What claims may name, and what is left of them: namespaces are tenants."""

import pytest

from harness import kubernetes_freeflow
from harness.engines import wait_until
from harness.failure import need
from harness.kubernetes import pod
from harness.kubernetes_freeflow import declared, wait_for_condition
from harness.kubernetes_pods import SLEEP, ByClaim, Way, claim_template, vnics, wait_for_no_vnic

OTHER = "team-b"


@pytest.fixture(scope="module", autouse=True)
def way(kubernetes):
    """The network `red` of `default`, `private` of another namespace, `shared` of all but a third, and one made by hand."""
    way = ByClaim(kubernetes)
    way.prepare()
    Way(kubernetes).declare("hand", "10.53.0.0/24")
    kubernetes.kubectl("create", "namespace", OTHER)
    kubernetes.apply(declared("Network", "private", OTHER, cidrs=["10.54.0.0/24"], podLabels=["role"]),
                     declared("ClusterNetwork", "shared", cidrs=["10.55.0.0/24"], allowedNamespaces=[OTHER]))
    wait_for_condition(kubernetes, "network", "private", "Enforced", namespace=OTHER)
    wait_for_condition(kubernetes, "clusternetwork", "shared", "Enforced", namespace=None)
    return way


@pytest.fixture(autouse=True)
def no_pods_left(kubernetes):
    yield
    for namespace in ("default", OTHER):
        kubernetes.delete("pods", "--all", namespace=namespace)
        kubernetes.delete("resourceclaimtemplates", "--all", namespace=namespace)
        kubernetes.delete("events", "--all", namespace=namespace)
    wait_for_no_vnic(kubernetes)
    node = kubernetes.node.machine
    wait_until(lambda: not list(node.path("/var/run/cdi").glob("freeflow-claim-*")), "the claims' CDI files are gone")


def claiming(name, parameters, namespace="default", words=SLEEP, labels=None):
    template = claim_template(name, parameters, namespace)
    claim = {"name": "rdma", "resourceClaimTemplateName": name}
    container = {"resources": {"claims": [{"name": "rdma"}]}}
    return [template, pod(name, words, namespace=namespace, labels=labels, container=container, resourceClaims=[claim])]


def refusal(kubernetes, name, namespace="default"):
    """The kubelet's event."""
    return kubernetes.wait_for_event(name, r"FailedPrepareDynamicResources: .*", namespace)


@pytest.mark.parametrize("network", ["private", "k8s.team-b.private", "shared", "hand", "no-such"])
def test_a_network_of_others_is_refused_as_one_that_is_not_there(kubernetes, network):
    kubernetes.apply(*claiming("one", {"network": network}))
    text = refusal(kubernetes, "one")
    need(f"has no network {network}" in text, text)
    need(not vnics(kubernetes), "there is a vNIC")


@pytest.mark.parametrize("parameters", [
    {"network": "../../../etc/cdi/x"}, {"network": "--run-dir"}, {"network": "red\",\"x\":\"y"}, {"network": "red\n"},
    {"network": "red", "namespaces": ["default"]}, {"network": "red", "tenantLabels": ["role"]}, {"network": "red", "more": 1},
    {"network": "red", "labels": {"role": "server"}}, {"vnic": "boss"}, {"kind": "Other"}, {"network": ["red"]},
], ids=str)
def test_parameters_that_a_tenant_may_not_give(kubernetes, parameters):
    kubernetes.apply(*claiming("one", parameters))
    text = refusal(kubernetes, "one")
    need("parameters" in text or "namespace" in text or "label" in text, text)
    need(not vnics(kubernetes), "there is a vNIC")


@pytest.mark.parametrize("network, name", [("private", "k8s.team-b.private"), ("shared", "k8s._.shared")])
def test_a_namespace_has_its_own_networks_and_those_that_are_shared_with_it(kubernetes, network, name):
    kubernetes.apply(*claiming("one", {"network": network}, OTHER))
    kubernetes.wait_for_ready("one", OTHER)
    need([vnic["network"] for vnic in vnics(kubernetes)] == [name], vnics(kubernetes))


def test_labels_of_a_pod_that_the_network_takes(kubernetes):
    kubernetes.apply(*claiming("one", {"network": "private"}, OTHER, labels={"role": "server", "boss": "yes"}))
    kubernetes.wait_for_ready("one", OTHER)
    labels = kubernetes.node.host.freeflow("get", "vnics", "-o", "yaml")
    need("role: server" in labels and "boss" not in labels, labels)


def test_containers_that_share_a_claim(kubernetes):
    """The second one gets what the first one has, or is refused with a reason; never another network."""
    template, made = claiming("one", {"network": "red"})
    first = made["spec"]["containers"][0]
    made["spec"]["containers"].append(first | {"name": "second"})
    kubernetes.apply(template, made)
    kubernetes.wait_for_ready("one")
    need({vnic["network"] for vnic in vnics(kubernetes)} == {"k8s.default.red"}, vnics(kubernetes))
    for container in ("main", "second"):
        need("PORT_ACTIVE" in kubernetes.exec("one", "ibv_devinfo", container=container), f"{container} has no device")


def test_the_agent_restarts(kubernetes):
    kubernetes.apply(*claiming("one", {"network": "red"}))
    kubernetes.wait_for_ready("one")
    kubernetes.delete("pods", "--selector", "app.kubernetes.io/component=node", namespace=kubernetes_freeflow.NAMESPACE)
    kubernetes_freeflow.wait_until_ready(kubernetes)
    need("PORT_ACTIVE" in kubernetes.exec("one", "ibv_devinfo"), "no device")
    kubernetes.apply(*claiming("two", {"network": "red"}))
    kubernetes.wait_for_ready("two")


def test_resource_slices_come_back(kubernetes):
    kubernetes.delete("resourceslices", "--all", namespace=None)
    wait_until(lambda: kubernetes_freeflow.slices(kubernetes), lambda: f"slices are there\n{kubernetes_freeflow.logs(kubernetes)}")


def test_a_network_in_use_is_deleted_after_its_last_pod(kubernetes):
    kubernetes.apply(declared("Network", "used", "default", cidrs=["10.57.0.0/24"]))
    wait_for_condition(kubernetes, "network", "used", "Enforced")
    kubernetes.apply(*claiming("one", {"network": "used"}))
    kubernetes.wait_for_ready("one")
    kubernetes.delete("networks.freeflow.io", "used", words=("--wait=false",))
    wait_for_condition(kubernetes, "network", "used", "Deleted", "False")
    kubernetes.delete("pod", "one")
    kubernetes.kubectl("wait", "--for=delete", "--timeout=90s", "networks.freeflow.io/used")
    need("k8s.default.used" not in kubernetes.node.host.freeflow("get", "networks"), "FreeFlow still has it")
