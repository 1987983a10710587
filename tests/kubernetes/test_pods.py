"""Pods that get a vNIC, by each way there is, on one node: unprivileged, all capabilities dropped, the default seccomp profile."""

import re
import signal

import pytest

from harness.engines import wait_until
from harness.failure import need
from harness.host import end_router
from harness.kubernetes import pod
from harness.kubernetes_pods import SLEEP, WAYS, between_two, vnics, wait_for_no_vnic

WRITE = ["ib_write_bw", "-F", "-n", "200"]
MANY = 10


@pytest.fixture(scope="module", params=WAYS)
def way(request, kubernetes):
    way = WAYS[request.param](kubernetes)
    way.prepare()
    yield way
    way.remove()


@pytest.fixture(autouse=True)
def no_pods_left(kubernetes):
    yield
    kubernetes.delete("pods", "--all")
    kubernetes.delete("events", "--all")
    wait_for_no_vnic(kubernetes)


def running(kubernetes, way, name="one", words=SLEEP, network=None, **spec):
    kubernetes.apply(*way.objects(name, words, network, **spec))
    kubernetes.wait_for_ready(name)
    return name


def test_a_plain_pod_has_no_vnic(kubernetes):
    kubernetes.apply(pod("plain", ["sh", "-c", "ls /sys/class/net; sleep 600"]))
    kubernetes.wait_for_phase("plain", "Running")
    output = kubernetes.exec("plain", "ls", "/sys/class/net", "/run")
    need("eth0" in output and "ff0" not in output and "freeflow" not in output, output)
    need("eth0" in kubernetes.logs("plain"), kubernetes.logs("plain"))


def test_perftest_between_two_pods(kubernetes, way):
    output = between_two(kubernetes, way, WRITE, [*WRITE, "{ip}"])
    need(re.search(r"^ 65536 +200 ", output, re.M), output)


def test_rdma_cm_between_two_pods(kubernetes, way):
    output = between_two(kubernetes, way, ["rping", "-s", "-a", "0.0.0.0", "-C", "10"],
                         ["sh", "-c", "rping -c -a {ip} -C 10 -v && echo done"])
    need("done" in output, output)


def test_a_pod_keeps_its_own_interface_and_loses_no_protection(kubernetes, way):
    running(kubernetes, way)
    output = kubernetes.exec("one", "sh", "-c", "ls /sys/class/net /run/freeflow; cat /proc/self/status; echo x >/run/freeflow/x || true")
    need("eth0" in output and "ff0" in output, output)
    need(re.search(r"^CapBnd:\s+0+$", output, re.M) and re.search(r"^CapEff:\s+0+$", output, re.M), output)
    need(re.search(r"^Seccomp:\s+2$", output, re.M) and re.search(r"^NoNewPrivs:\s+1$", output, re.M), output)
    need("admin.sock" not in output and "router.sock" in output, output)
    need("x" not in kubernetes.exec("one", "ls", "/run/freeflow").split(), "the pod writes among FreeFlow's files")


def test_the_network_is_the_one_that_was_asked_for(kubernetes, way):
    running(kubernetes, way, network="red")
    need([vnic["network"] for vnic in vnics(kubernetes)] == [way.full_name("red")], vnics(kubernetes))


def test_an_unknown_network_is_in_the_pods_events(kubernetes, way):
    kubernetes.apply(*way.objects("one", SLEEP, "blue"))
    kubernetes.wait_for_event("one", "blue")
    need(not vnics(kubernetes), "there is a vNIC")


def test_a_pod_may_not_name_a_network_that_is_not_listed(kubernetes):
    runtime = WAYS["runtime"](kubernetes)
    kubernetes.apply(runtime.CLASS, *runtime.objects("one", SLEEP, "green"))
    kubernetes.wait_for_event("one", "green")
    need(not vnics(kubernetes), "there is a vNIC")


def test_an_annotation_is_no_cdi_device(kubernetes):
    made = pod("one", SLEEP)
    made["metadata"]["annotations"] = {"cdi.k8s.io/freeflow": "freeflow.io/net=default"}
    kubernetes.apply(made)
    kubernetes.wait_for_ready("one")
    need(not vnics(kubernetes) and "ff0" not in kubernetes.exec("one", "ls", "/sys/class/net"), vnics(kubernetes))


def test_a_container_that_restarts_has_a_vnic_again(kubernetes, way):
    kubernetes.apply(*way.objects("one", ["sh", "-c", "ibv_devinfo; sleep 2"], restartPolicy="Always"))
    kubernetes.wait_for_restart("one")
    wait_until(lambda: "PORT_ACTIVE" in kubernetes.logs("one"), lambda: f"the second one has a device:\n{kubernetes.logs('one')}")
    need(len(vnics(kubernetes)) <= 1, vnics(kubernetes))


def test_a_killed_shim_leaves_nothing(kubernetes, way):
    running(kubernetes, way)
    kubernetes.node.kill_shim("one")
    kubernetes.delete("pod", "one", words=("--grace-period=0", "--force"))
    wait_for_no_vnic(kubernetes)


def test_the_kubelet_restarts(kubernetes, way):
    running(kubernetes, way)
    before = vnics(kubernetes)
    kubernetes.node.stop_kubelet(signal.SIGKILL)
    kubernetes.node.start_kubelet()
    kubernetes.node.wait_for_new_heartbeat()
    # It takes up its pods after it has said that the node is ready.
    wait_until(lambda: "PORT_ACTIVE" in kubernetes.exec("one", "ibv_devinfo", codes=(0, 1)), "the pod is reached, and has its device")
    need(vnics(kubernetes) == before, vnics(kubernetes))
    need("PORT_ACTIVE" in kubernetes.exec(running(kubernetes, way, "two"), "ibv_devinfo"), "no device")


def test_containerd_restarts(kubernetes, way):
    running(kubernetes, way)
    kubernetes.node.stop_containerd(signal.SIGKILL)
    kubernetes.node.start_containerd()
    kubernetes.node.wait_for_new_heartbeat()
    need("PORT_ACTIVE" in kubernetes.exec("one", "ibv_devinfo"), "no device")
    kubernetes.delete("pod", "one")
    wait_for_no_vnic(kubernetes)
    need("PORT_ACTIVE" in kubernetes.exec(running(kubernetes, way, "two"), "ibv_devinfo"), "no device")


def test_the_router_dies(kubernetes, way):
    running(kubernetes, way)
    end_router(kubernetes.node.host)
    kubernetes.apply(*way.objects("two", SLEEP))
    kubernetes.wait_for_event("two", way.DOWN)
    kubernetes.delete("pod", "two")
    kubernetes.node.host.up()
    way.wait_until_ready()
    kubernetes.delete("pod", "one")
    wait_for_no_vnic(kubernetes)
    need("PORT_ACTIVE" in kubernetes.exec(running(kubernetes, way, "three"), "ibv_devinfo"), "no device")


def test_many_pods_at_once(kubernetes, way):
    names = [f"many{number}" for number in range(MANY)]
    kubernetes.apply(*(each for name in names for each in way.objects(name, ["ibv_devinfo"])))
    for name in names:
        kubernetes.wait_for_phase(name, "Succeeded")
        need("PORT_ACTIVE" in kubernetes.logs(name), kubernetes.logs(name))
