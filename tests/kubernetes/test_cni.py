"""`freeflow-cni` behind Debian's `bridge`, called by containerd as the kubelet has it make pods' networks: the vNIC is the pod's."""

import re
import signal

import pytest

from harness.engines import wait_until
from harness.failure import need
from harness.host import end_router
from harness.kubernetes import pod
from harness.kubernetes_pods import SLEEP, ByRuntimeClass, Way, listens, vnics, wait_for_no_vnic

NETWORK = "pods"
CHAINED = {"type": "freeflow-cni", "network": NETWORK}


@pytest.fixture(scope="module", autouse=True)
def chained(kubernetes):
    """The network is that of the nodes' pods, and this node's part of it is the bridge's."""
    node = kubernetes.node
    Way(kubernetes).declare(NETWORK, "10.88.0.0/16", range=node.pod_addresses)
    Way(kubernetes).declare("blue", "10.59.0.0/24")
    write(kubernetes, CHAINED)
    kubernetes.apply(ByRuntimeClass.CLASS)


@pytest.fixture(autouse=True)
def no_pods_left(kubernetes):
    yield
    kubernetes.delete("pods", "--all")
    kubernetes.delete("events", "--all")
    wait_for_no_vnic(kubernetes)


def write(kubernetes, *plugins):
    """The list of plugins, with which containerd begins."""
    node = kubernetes.node
    node.stop_containerd()
    node.write_cni(node.bridge(), *plugins)
    node.start_containerd()
    node.wait_for_new_heartbeat()


def running(kubernetes, name="one", words=SLEEP, **spec):
    """A pod whose containers are started by `freeflow-runtime`, which names no network; its address."""
    kubernetes.apply(pod(name, words, runtimeClassName="freeflow", **spec))
    kubernetes.wait_for_ready(name)
    return address(kubernetes, name)


def address(kubernetes, name):
    return kubernetes.get("pod", name)["status"]["podIP"]


def addresses(kubernetes):
    return sorted(vnic["address"] for vnic in vnics(kubernetes))


def test_a_pods_address_has_the_vnic(kubernetes):
    ip = running(kubernetes)
    need([(row["address"], row["network"]) for row in vnics(kubernetes)] == [(ip, NETWORK)], f"{ip}: {vnics(kubernetes)}")
    output = kubernetes.exec("one", "sh", "-c", "ibv_devinfo -v; ls /sys/class/net")
    need(f"::ffff:{ip}" in output and "eth0" in output.split() and "ff0" not in output.split(), output)


def test_perftest_between_two_pods(kubernetes):
    ip = running(kubernetes, "server", ["ib_write_bw", "-F", "-n", "200"])
    wait_until(lambda: listens(kubernetes, "server"), "the server listens")
    kubernetes.apply(pod("client", ["ib_write_bw", "-F", "-n", "200", ip], runtimeClassName="freeflow"))
    kubernetes.wait_for_phase("client", "Succeeded")
    kubernetes.wait_for_phase("server", "Succeeded")
    need(re.search(r"^ 65536 +200 ", kubernetes.logs("client"), re.M), kubernetes.logs("client"))


def test_containers_of_a_pod_share_the_vnic(kubernetes):
    made = pod("one", SLEEP, runtimeClassName="freeflow")
    made["spec"]["containers"].append(made["spec"]["containers"][0] | {"name": "second"})
    kubernetes.apply(made)
    kubernetes.wait_for_ready("one")
    need(addresses(kubernetes) == [address(kubernetes, "one")], vnics(kubernetes))
    gids = [re.findall(r"GID.*", kubernetes.exec("one", "ibv_devinfo", "-v", container=name)) for name in ("main", "second")]
    need(gids[0] and gids[0] == gids[1], f"{gids}")


def test_a_container_that_restarts_finds_its_pods_vnic(kubernetes):
    kubernetes.apply(pod("one", ["sh", "-c", "ibv_devinfo; sleep 2"], runtimeClassName="freeflow", restartPolicy="Always"))
    kubernetes.wait_for_restart("one")
    wait_until(lambda: "PORT_ACTIVE" in kubernetes.logs("one"), lambda: f"the second one has a device:\n{kubernetes.logs('one')}")
    need(addresses(kubernetes) == [address(kubernetes, "one")], vnics(kubernetes))


def test_a_pod_of_another_runtime_has_no_device(kubernetes):
    """The address has a vNIC, and no container of the pod gets it."""
    kubernetes.apply(pod("plain", SLEEP))
    kubernetes.wait_for_ready("plain")
    need(addresses(kubernetes) == [address(kubernetes, "plain")], vnics(kubernetes))
    need("freeflow" not in kubernetes.exec("plain", "ls", "/run", "/sys/class/net"), "there are FreeFlow's files")


def test_namespaces_have_networks_of_their_own(kubernetes):
    write(kubernetes, {"type": "freeflow-cni", "namespaces": {"default": "blue"}, "address": "own"})
    try:
        running(kubernetes)
        need([row["network"] for row in vnics(kubernetes)] == ["blue"], vnics(kubernetes))
        need("ff0" in kubernetes.exec("one", "ls", "/sys/class/net"), "no interface")
        kubernetes.delete("pod", "one")
        wait_for_no_vnic(kubernetes)
    finally:
        write(kubernetes, CHAINED)


def test_containerd_restarts(kubernetes):
    ip = running(kubernetes)
    kubernetes.node.stop_containerd(signal.SIGKILL)
    kubernetes.node.start_containerd()
    kubernetes.node.wait_for_new_heartbeat()
    need(addresses(kubernetes) == [ip] and "PORT_ACTIVE" in kubernetes.exec("one", "ibv_devinfo"), vnics(kubernetes))


def test_a_killed_shim_leaves_nothing(kubernetes):
    running(kubernetes)
    kubernetes.node.kill_shim("one")
    kubernetes.delete("pod", "one", words=("--grace-period=0", "--force"))
    wait_for_no_vnic(kubernetes)


def test_the_router_dies(kubernetes):
    """No pod can begin meanwhile, and the kubelet tries again."""
    running(kubernetes)
    end_router(kubernetes.node.host)
    kubernetes.apply(pod("two", SLEEP, runtimeClassName="freeflow"))
    kubernetes.wait_for_event("two", "FailedCreatePodSandBox.*(router|freeflow up)")
    kubernetes.node.host.up()
    kubernetes.wait_for_ready("two")
    need("PORT_ACTIVE" in kubernetes.exec("two", "ibv_devinfo"), "no device")
