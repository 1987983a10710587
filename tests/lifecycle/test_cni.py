"""The CNI plugin as runtimes call it: chained after Debian's `bridge`, and alone; pods of it with podman and the CDI device."""

import contextlib
import json
import os
import re
import shutil
import signal
import time

import pytest

import harness
from harness import cni, made_images, podman
from harness.cni import Refused
from harness.failure import need
from harness.processes import run, steady

SUBNET = "10.77.0.0/24"
NETWORKS = "".join(
    f"---\napiVersion: freeflow.io/v1\nkind: Network\nmetadata: {{name: {name}}}\nspec: {{cidrs: [{cidr}]}}\n"
    for name, cidr in (("pods", SUBNET), ("blue", "10.78.0.0/24"), ("six", '10.79.0.0/24, "fd79::/64"')))
ALONE = {"cniVersion": "1.1.0", "name": "alone", "type": "freeflow-cni", "network": "blue"}


@pytest.fixture(scope="module")
def place():
    harness.require_commands("podman", "runc", "ip", "ib_write_bw", "ibv_devinfo", "/usr/lib/cni/bridge")
    with podman.on_own_host() as place:
        file = place.host.directory / "networks.yaml"
        file.write_text(NETWORKS)
        place.host.freeflow("apply", "-f", file)
        # The devices of these networks, in the folder that podman sees.
        cdi = place.host.up_options[place.host.up_options.index("--cdi-dir") + 1]
        shutil.copytree(cdi, place.host.directory / "cdi", dirs_exist_ok=True)
        yield place


@pytest.fixture(scope="module")
def plugin(place):
    return cni.Plugin(place.host)


@contextlib.contextmanager
def added(plugin, configuration, pod, **more):
    """A pod with the plugin alone, and its result."""
    result = plugin.call("ADD", configuration, pod, **more)
    try:
        yield result
    finally:
        plugin.call("DEL", configuration, pod, **more)


@contextlib.contextmanager
def chained(plugin, pods):
    """Pods of a list with `bridge`, and their results."""
    bridge, plugins = cni.bridge_list(plugin.directory, "pods", SUBNET)
    try:
        results = [plugin.walk("ADD", plugins, pod) for pod in pods]
        yield results
        for pod, result in zip(pods, results):
            plugin.walk("CHECK", plugins, pod, result)
    finally:
        for pod in pods:
            plugin.walk("DEL", plugins, pod)
        run(["ip", "link", "delete", bridge], codes=(0, 1))


def vnics(plugin):
    return plugin.host.status()["vnics"]


def refused(code, call):
    with pytest.raises(Refused) as caught:
        call()
    need(caught.value.code == code, f"another code than {code}: {caught.value.error}")
    return caught.value.error["details"]


@steady
def perftest(server, client, network, address):
    listening = server.start(network, "ib_write_bw", "-F", "-n", "200")
    server.wait_for_port(listening)
    output = client.run(network, "ib_write_bw", "-F", "-n", "200", address)
    need(listening.wait(60) == 0, listening.output())
    need(re.search(r"^ *65536 +200 ", output, re.MULTILINE), f"no row of results:\n{output}")


def test_after_another_plugin_the_pods_address_has_a_vnic(place, plugin):
    with cni.pods(place, "", "") as pods, chained(plugin, pods) as results:
        for pod, result in zip(pods, results):
            names = [interface["name"] for interface in result["interfaces"]]
            need(len(names) == 3 and names[2] == "eth0" and len(result["ips"]) == 1, f"not bridge's own result: {result}")
            need([f"{address}/24" for address in pod.addresses()] == [result["ips"][0]["address"]], f"{result}")
        addresses = [pod.addresses()[0] for pod in pods]
        need(sorted(vnic["address"] for vnic in vnics(plugin)) == sorted(addresses), f"{vnics(plugin)}")
        need(all(["tier", "web"] in vnic["labels"] for vnic in vnics(plugin)), f"no label: {vnics(plugin)}")
        output = pods[0].run("pods", "sh", "-c", "ibv_devinfo -v; cat /sys/class/infiniband/*/ports/1/gid_attrs/ndevs/0; ls /sys/class/net")
        need(f"::ffff:{addresses[0]}" in output and "ff0" not in output.split(), output)
        perftest(*pods, "pods", addresses[0])
        # Two containers of one pod.
        perftest(pods[0], pods[0], "pods", addresses[0])
        # The ends of these containers are no ends of their vNICs, and ps shows the pods.
        need(len(vnics(plugin)) == 2, f"{vnics(plugin)}")
        rows = [row for row in plugin.host.containers() if row["engine"] == "cni"]
        need(sorted(row["ip"] for row in rows) == sorted(addresses), f"{rows}")
    need(vnics(plugin) == [], f"left: {vnics(plugin)}")


def test_alone_it_makes_the_interface(place, plugin):
    with cni.pods(place, "", "") as (one, two), added(plugin, ALONE, one) as result, added(plugin, ALONE, two) as other:
        address = one.addresses()[0]
        host, inside = result["interfaces"]
        need((inside["name"], inside["sandbox"]) == ("eth0", str(one.path)) and "sandbox" not in host, f"{result}")
        need(result["ips"] == [{"address": f"{address}/24", "interface": 1}], f"{result}")
        need(result["cniVersion"] == "1.1.0" and "routes" not in result, f"{result}")
        perftest(one, two, "blue", address)
        plugin.call("CHECK", {**ALONE, "prevResult": result}, one)
        need("prevResult" in refused(7, lambda: plugin.call("CHECK", ALONE, one)), "without prevResult")
        refused(101, lambda: plugin.call("CHECK", {**ALONE, "prevResult": other}, one))
        one.inside("ip", "address", "flush", "dev", "eth0")
        need("the address" in refused(101, lambda: plugin.call("CHECK", {**ALONE, "prevResult": result}, one)), "flushed")
    need(vnics(plugin) == [], f"left: {vnics(plugin)}")
    # Once more is no fault, nor without a namespace.
    plugin.call("DEL", ALONE, one)
    plugin.call("DEL", ALONE, one, CNI_NETNS="")


def test_the_network_default_brings_a_route_and_old_versions_their_form(place, plugin):
    default = {**ALONE, "network": "default", "cniVersion": "0.3.1", "capabilities": {"ips": True}}
    with cni.pods(place, "") as (pod,), added(plugin, default, pod) as result:
        ip = result["ips"][0]
        need(ip["version"] == "4" and result["routes"] == [{"dst": "0.0.0.0/0", "gw": ip["gateway"]}], f"{result}")
        need(all("mtu" not in interface for interface in result["interfaces"]), f"{result}")
        need(f"default via {ip['gateway']}" in pod.inside("ip", "route"), pod.inside("ip", "route"))
        refused(1, lambda: plugin.call("CHECK", {**default, "prevResult": result}, pod))
    six = {**ALONE, "network": "six", "capabilities": {"ips": True}, "runtimeConfig": {"ips": ["10.79.0.99/24"]}}
    with cni.pods(place, "") as (pod,), added(plugin, six, pod) as result:
        addresses = [ip["address"] for ip in result["ips"]]
        need(addresses[0] == "10.79.0.99/24" and addresses[1].startswith("fd79::"), f"{result}")


def test_a_chain_may_have_an_address_of_its_own(place, plugin):
    """Behind any plugin, whatever its addresses are."""
    previous = {"cniVersion": "1.1.0", "interfaces": [], "ips": [{"address": "192.0.2.7/24"}], "dns": {"domain": "x"}}
    own = {**ALONE, "prevResult": previous, "address": "own"}
    with cni.pods(place, "") as (pod,), added(plugin, own, pod) as result:
        need(result["ips"][0] == previous["ips"][0] and result["dns"] == previous["dns"], f"{result}")
        need(result["ips"][1]["address"].startswith("10.78.0.") and result["interfaces"][1]["name"] == "ff0", f"{result}")
        need(pod.addresses("ff0"), f"{pod.interfaces()}")
        plugin.call("CHECK", {**own, "prevResult": result}, pod)


def test_a_namespace_of_kubernetes_has_the_listed_network(place, plugin):
    listed = {**{key: value for key, value in ALONE.items() if key != "network"}, "namespaces": {"team-a": "blue"}}
    args = "IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME=web-0;K8S_POD_INFRA_CONTAINER_ID=x"
    with cni.pods(place, args.format("team-a"), args.format("team-b"), "K8S_POD_NAMESPACE=team-a;network=pods") as pods:
        with added(plugin, listed, pods[0]):
            need([(vnic["name"], vnic["network"]) for vnic in vnics(plugin)] == [("web-0.team-a", "blue")], f"{vnics(plugin)}")
        need("team-b" in refused(7, lambda: plugin.call("ADD", listed, pods[1])), "the namespace is not named")
        need("'network'" in refused(4, lambda: plugin.call("ADD", listed, pods[2])).replace('"', "'"), "an unknown key")
    need(vnics(plugin) == [], f"left: {vnics(plugin)}")


def test_bad_calls_leave_nothing(place, plugin):
    previous = {"cniVersion": "1.1.0", "ips": [{"address": "192.0.2.7/24"}]}
    with cni.pods(place, "") as (pod,):
        def add(code, configuration=ALONE, **more):
            return refused(code, lambda: plugin.call("ADD", configuration, pod, **more))

        need('netwrok="blue"' in add(2, {**ALONE, "netwrok": "blue"}), "the key and its value")
        need("192.0.2.7" in add(7, {**ALONE, "prevResult": previous}), "the address")
        need("IPv6" in add(7, {**ALONE, "network": "six", "prevResult": {"ips": [{"address": "10.79.0.7/24"}]}}), "two families")
        need("there is: " in add(7, {**ALONE, "network": "none"}), "the networks that there are")
        add(1, {**ALONE, "cniVersion": "0.2.0"})
        add(6, "{")
        add(4, CNI_NETNS="/run/netns/none")
        add(4, CNI_NETNS="/etc/passwd")
        need("the host's" in add(4, CNI_NETNS=f"/proc/{os.getpid()}/ns/net"), "the host's namespace")
        need("CNI_IFNAME=lo" in add(4, CNI_IFNAME="lo"), "an interface that is there")
        add(4, CNI_CONTAINERID="../x")
        add(4, CNI_COMMAND="NONE")
        need(vnics(plugin) == [] and not list(plugin.host.run_dir.glob("cni/*.json")), "something is left")
        with added(plugin, ALONE, pod):
            need("DEL comes first" in add(100), "twice")
            add(4, {**ALONE, "network": "pods"})
            need("already" in add(100, {**ALONE, "name": "other"}, CNI_IFNAME="eth1"), "two in one network")
            need(len(vnics(plugin)) == 1, f"{vnics(plugin)}")


def test_a_container_elsewhere_has_a_vnic_of_its_own(place, plugin):
    """Neither by the network's name, nor in a network namespace that another one was in before."""
    with cni.pods(place, "", "") as (pod, other), added(plugin, ALONE, pod) as result:
        show = ["sh", "-c", "ibv_devinfo -v; ls /sys/class/net"]
        address = result["ips"][0]["address"].split("/")[0]
        need(f"::ffff:{address}" in pod.run("blue", *show), "the pod's own container")
        output = other.run("blue", *show)
        need("::ffff:10.78.0." in output and f"::ffff:{address}\n" not in output and "ff0" in output.split(), output)
        need("::ffff:10.77.0." in pod.run("pods", *show), "another network than the pod's")
        # As if the namespace had ended, and the next one had its inode number.
        file, = plugin.host.run_dir.glob("cni/*.json")
        text = file.read_text()
        attachment = json.loads(text)
        attachment["namespace"]["cookie"] += 1
        file.write_text(json.dumps(attachment))
        need(f"::ffff:{address}\n" not in pod.run("blue", *show), "it joined a vNIC of another namespace")
        file.write_text(text)
    need(vnics(plugin) == [], f"left: {vnics(plugin)}")


def test_stale_attachments_are_collected(place, plugin):
    with cni.pods(place, "", "", "") as pods:
        for pod in pods:
            plugin.call("ADD", ALONE, pod)
        valid = [{"containerID": pods[0].name, "ifname": "eth0"}]
        plugin.call("GC", ALONE)
        plugin.call("GC", {**ALONE, "name": "other", "cni.dev/valid-attachments": []})
        need(len(vnics(plugin)) == 3, "GC of another configuration, or without a list, ended some")
        plugin.call("GC", {**ALONE, "cni.dev/valid-attachments": valid + [{"containerID": pods[1].name, "ifname": "eth0"}]})
        need(len(vnics(plugin)) == 2, f"{vnics(plugin)}")
        # The runtime died with its pods: nobody calls DEL.
        run(["ip", "netns", "delete", pods[1].name])
        plugin.host.freeflow("up")
        need([vnic["address"] for vnic in vnics(plugin)] == pods[0].addresses(), f"{vnics(plugin)}")
        # The machine was started again, with its run directory on a disk: what the path shows is another namespace.
        file, = plugin.host.run_dir.glob("cni/*.json")
        text = file.read_text()
        attachment = json.loads(text)
        attachment["namespace"]["boot"] = "another"
        file.write_text(json.dumps(attachment))
        plugin.host.freeflow("up")
        need(vnics(plugin) == [] and pods[0].addresses() == [], f"left: {vnics(plugin)}")
        # A vNIC whose attachment was lost, and a half-written file.
        result = plugin.call("ADD", ALONE, pods[0])
        file, = plugin.host.run_dir.glob("cni/*.json")
        file.rename(file.with_suffix(".tmp1"))
        refused(101, lambda: plugin.call("CHECK", {**ALONE, "prevResult": result}, pods[0]))
        plugin.call("GC", ALONE)
        need(vnics(plugin) == [] and pods[0].addresses() == [], f"left: {vnics(plugin)}")
        plugin.call("ADD", ALONE, pods[0])
        file, = plugin.host.run_dir.glob("cni/*.json")
        file.unlink()
        plugin.host.freeflow("up")
        need(vnics(plugin) == [] and not list(plugin.host.run_dir.glob("cni/[0-9]*")), f"left: {vnics(plugin)}")
        plugin.call("DEL", {**ALONE, "netwrok": "x"}, pods[0])
        need(vnics(plugin) == [], f"left: {vnics(plugin)}")


def test_a_plugin_or_a_router_that_is_killed_costs_nothing(place, plugin):
    host = plugin.host
    with cni.pods(place, "") as (pod,):
        router = host.router_pid()
        os.kill(router, signal.SIGSTOP)
        try:
            call = cni.started(plugin.program, "ADD", ALONE, plugin.environment(pod))
            time.sleep(0.3)
            call.kill()
            call.communicate()
        finally:
            os.kill(router, signal.SIGCONT)
        plugin.call("ADD", ALONE, pod)
        need(len(vnics(plugin)) == 1, f"{vnics(plugin)}")
        # Unfinished, as when the plugin is killed between vNIC and interface.
        file, = host.run_dir.glob("cni/*.json")
        attachment = json.loads(file.read_text())
        file.write_text(json.dumps({**attachment, "is_complete": False}))
        need("has not finished" in pod.run("blue", "true", codes=(126, 127)), "a container has started")
        result = plugin.call("ADD", ALONE, pod)
        need(len(vnics(plugin)) == 1, f"{vnics(plugin)}")
        # The vNIC outlives the router, and is ended without one.
        harness.end_router(host)
        need(refused(50, lambda: plugin.call("STATUS", ALONE)), "no router")
        refused(11, lambda: plugin.call("ADD", {**ALONE, "name": "other"}, pod))
        host.up()
        plugin.call("STATUS", ALONE)
        plugin.call("CHECK", {**ALONE, "prevResult": result}, pod)
        harness.end_router(host)
        plugin.call("DEL", ALONE, pod)
        need(pod.addresses() == [], f"{pod.interfaces()}")
        host.up()
        need(vnics(plugin) == [], f"left: {vnics(plugin)}")


def test_many_at_once(place, plugin):
    with cni.pods(place, *[""] * 8) as pods:
        calls = [cni.started(plugin.program, "ADD", ALONE, plugin.environment(pod)) for pod in pods]
        results = [cni.answer_of(call) for call in calls]
        addresses = {result["ips"][0]["address"] for result in results}
        need(len(addresses) == len(pods) == len(vnics(plugin)), f"{addresses}")
        calls = [cni.started(plugin.program, "DEL", ALONE, plugin.environment(pod)) for pod in pods]
        for call in calls:
            cni.answer_of(call)
    need(vnics(plugin) == [], f"left: {vnics(plugin)}")


def test_a_runtime_without_cdi_gives_the_pods_vnic(place, plugin):
    """`freeflow-runtime`, where nothing names a network."""
    root = made_images.make_root(plugin.directory / "image", "sh", "ibv_devinfo")
    with cni.pods(place, "") as (pod,), added(plugin, ALONE, pod) as result:
        bundle = plugin.directory / "bundle"
        bundle.mkdir()
        run(["runc", "spec", "--bundle", bundle])
        file = bundle / "config.json"
        spec = json.loads(file.read_text())
        spec["process"].update(terminal=False, args=["ibv_devinfo", "-v"])
        spec["root"]["path"] = str(root)
        network, = (one for one in spec["linux"]["namespaces"] if one["type"] == "network")
        network["path"] = str(pod.path)
        file.write_text(json.dumps(spec))
        output = run([plugin.host.freeflow_path, "--run-dir", plugin.host.run_dir, "runtime", "--root",
                      plugin.directory / "state", "run", "--bundle", bundle, pod.name])
        need(f"::ffff:{result['ips'][0]['address'].split('/')[0]}" in output, output)
        need(len(vnics(plugin)) == 1, "the pod's vNIC has ended with its container")


def test_versions(plugin):
    answer = plugin.call("VERSION", {"cniVersion": "1.0.0"})
    need(answer == {"cniVersion": "1.0.0", "supportedVersions": ["0.3.1", "0.4.0", "1.0.0", "1.1.0"]}, f"{answer}")
    need(plugin.call("VERSION", "")["cniVersion"] == "1.1.0", "without input")
    refused(1, lambda: plugin.call("GC", {**ALONE, "cniVersion": "1.0.0"}))
    need("none" in refused(50, lambda: plugin.call("STATUS", {**ALONE, "network": "none"})), "the network")


def test_down_says_what_it_ends(place, plugin):
    with cni.pods(place, "") as (pod,):
        result = plugin.call("ADD", ALONE, pod)
        output = plugin.host.freeflow("down", codes=(1,))
        need(pod.name[:12] in output, output)
        plugin.host.freeflow("down", "--force")
        need(pod.addresses() == [], f"{pod.interfaces()}")
        plugin.call("DEL", ALONE, pod)
        plugin.host.up()
        need("no attachment" in refused(101, lambda: plugin.call("CHECK", {**ALONE, "network": "default", "prevResult": result}, pod)), "")
