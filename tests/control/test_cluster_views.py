"""All hosts of a cluster in one view, as each says of itself, and names by which containers find each other.

The cases go in this order, on one laboratory: what one leaves, the next one finds.
"""

import json

import pytest

import harness
from harness import Running, need
from harness.api import Api
from harness.cluster import HOSTS, following
from harness.settings import PORT

DECLARED = """
apiVersion: freeflow.io/v1
kind: Network
metadata: {name: red}
spec: {tenant: red, cidrs: [10.50.0.0/24, "fd00:50::/64"]}
---
apiVersion: freeflow.io/v1
kind: Network
metadata: {name: blue}
spec: {tenant: blue, cidrs: [10.60.0.0/24]}
"""


@pytest.fixture(scope="module")
def hosts():
    harness.require_commands("etcd", "etcdctl", "openssl", "ib_write_bw")
    with following(DECLARED, "red", "blue") as hosts:
        yield hosts


@pytest.fixture(scope="module")
def pair(hosts):
    """A container on each of two hosts."""
    return hosts.host(1).container("one", "--network", "red"), hosts.host(2).container("two", "--network", "red")


def vnics(hosts):
    """By host and title."""
    items = json.loads(hosts.as_operator("get", "vnics", "-o", "json"))["items"]
    return {(item["status"]["host"], item["status"]["title"]): item for item in items}


def test_the_vnics_of_all_hosts_are_in_one_list(hosts, pair):
    one, two = pair
    rows = hosts.wait("both are told of", lambda: (rows := vnics(hosts)) if len(vnics(hosts)) == 2 else None)
    need(set(rows) == {("host1", "one"), ("host2", "two")}, f"{rows}")
    row = rows["host2", "two"]
    need(row["spec"]["addresses"][0] == two.ip and len(row["spec"]["addresses"]) == 2, f"{row}")
    need(row["status"]["tenant"] == "red" and row["status"]["ageSeconds"] < 60, f"{row}")
    need(row["status"]["container"]["program"] == "sleep", f"{row}")
    text = hosts.as_operator("get", "vnics")
    need("HOST" in text and "AGE" in text and "host1" in text and two.ip in text, text)
    named = json.loads(hosts.as_operator("get", "vnic", "two", "-o", "json"))
    need(named["status"]["host"] == "host2", f"{named}")
    hosts.as_operator("get", "vnic", "nobody", codes=(4,))
    yaml = hosts.as_operator("get", "vnics", "-o", "yaml")
    need("ageSeconds" in yaml, yaml)
    hosts.wait("counted", lambda: [item["status"]["vnicCount"] for item in json.loads(
        hosts.as_operator("get", "hosts", "-o", "json"))["items"]] == [1, 1, 0])
    for labels, count in (("role=web", 0), ("!role", 2), ("role!=web", 2)):
        found = json.loads(hosts.as_operator("get", "vnics", "-l", labels, "-o", "json"))["items"]
        need(len(found) == count, f"{labels}: {found}")
    need("terms are" in hosts.as_operator("get", "vnics", "-l", "a in (b)", codes=(2,)), "a bad selector")
    text = hosts.as_operator("get", "hosts")
    need(hosts.rows["host3"]["address"] in text and "FOLLOWS" in text, text)


def test_a_host_shows_the_containers_and_traffic_of_all(hosts, pair):
    """By its own credential, without a word of where the cluster is."""
    host = hosts.host(3)

    def on_host(*words, codes=(0,)):
        return harness.run(host.enter(*host.command(*words)), 60, codes=codes)
    text = on_host("ps", "--all-hosts")
    need("one" in text and "host2" in text and "AGE" in text and "sleep" in text, text)
    expected = {("one", "host1", pair[0].pid), ("two", "host2", pair[1].pid)}
    hosts.wait("their processes", lambda: expected == {
        (row["name"], row["host"], row["pid"]) for row in json.loads(on_host("ps", "--all-hosts", "-o", "json"))})
    harness.in_two_containers(pair[0], pair[1], ["ib_write_bw", "-D", "3", "--report_gbits"],
                              ["ib_write_bw", "-D", "3", "--report_gbits", "{ip}"])

    def busy():
        rows = json.loads(on_host("top", "--all-hosts", "--once", "-d", "0.2", "-o", "json"))["vnics"]
        return [row for row in rows if row["status"]["traffic"]["bitsPerSecondOut"] > 0]
    # Told with whatever else there is to tell, if not with the heartbeat.
    others = [hosts.host(n).container(f"other{n}") for n in (1, 2)]
    rows = hosts.wait("its traffic is told of", busy)
    need(rows[0]["status"]["host"] in ("host1", "host2") and rows[0]["status"]["traffic"]["path"] == "wire", f"{rows}")
    text = on_host("top", "--all-hosts", "--once", "-d", "0.2")
    need("MSG/S" in text and "host1" in text, text)
    need("--all-hosts" in on_host("ps", "--all-hosts", "--qps", codes=(2,)), "queue pairs of all hosts")
    for other in others:
        other.remove()


def test_changes_are_watched(hosts, pair):
    host = hosts.host(3)
    watch = Running(host.enter(host.freeflow_path, "get", "vnics", "-w", "--cluster", hosts.operator))
    try:
        watch.wait_for_output("two")
        late = hosts.host(3).container("late", "--network", "blue")
        watch.wait_for_output("late")
        late.remove()
        hosts.wait("its end is told of", lambda: [
            line.split()[0] for line in watch.output().splitlines() if "late" in line] == ["ADDED", "DELETED"])
        need(watch.output().startswith("EVENT"), watch.output())
    finally:
        watch.kill()


def addresses(container, name):
    """As programs of a container find them, IPv4."""
    output = container.exec("getent", "ahostsv4", name, codes=(0, 2))
    return list(dict.fromkeys(line.split()[0] for line in output.splitlines() if line))


def test_containers_find_those_of_other_hosts_by_name(hosts, pair):
    one, two = pair
    hosts.wait("each knows the other one", lambda: addresses(one, "two") == [two.ip] and addresses(two, "one") == [one.ip])
    need("fd00:50::" in one.exec("getent", "ahostsv6", "two"), "no IPv6 address")
    server = two.start("ib_write_bw", "-n", "100", "-p", PORT)
    two.wait_for_port(server)
    one.exec("ib_write_bw", "-n", "100", "-p", PORT, "two")
    need(server.wait(20) == 0, server.output())
    # One of the same name, on a third host: both addresses, the older one first; and a tenant's names are its own.
    again, other = hosts.host(3).container("two", "--network", "red"), hosts.host(3).container("other", "--network", "blue")
    try:
        hosts.wait("both", lambda: sorted(addresses(one, "two")) == sorted([two.ip, again.ip]))
        lines = [line.split()[0] for line in one.exec("grep", "-w", "two", "/etc/hosts").splitlines() if "." in line.split()[0]]
        need(lines == [two.ip, again.ip], f"{lines}")
        hosts.wait("told of", lambda: ("host3", "other") in vnics(hosts))
        need(addresses(one, "other") == [] == addresses(other, "one"), "a name of another tenant")
    finally:
        again.remove()
        other.remove()
    hosts.wait("it is gone", lambda: addresses(one, "two") == [two.ip])


def test_a_declared_vnic_is_shown_once_and_named_wherever_it_is(hosts, pair):
    hosts.apply("apiVersion: freeflow.io/v1\nkind: Vnic\nmetadata: {name: database}\nspec: {network: red}\n")
    hosts.wait_for_all()
    for number in (3, 1):
        host = hosts.host(number)
        host.freeflow("run", "-d", "--vnic", "database", "--name", f"user{number}", "--", "sleep", "infinity")

        def rows():
            items = json.loads(hosts.as_operator("get", "vnics", "-o", "json"))["items"]
            return [item for item in items if item["metadata"]["name"] == "database"]
        name = f"host{number}"
        row = hosts.wait("the host that has it", lambda: len(rows()) == 1 and rows()[0] if rows()[0]["status"].get(
            "container") and rows()[0]["status"]["host"] == name else None)
        need(row["status"]["container"]["name"] == f"user{number}" and row["status"]["behind"] == [], f"{row}")
        found = row["spec"]["addresses"][0]
        hosts.wait("its names", lambda: addresses(pair[1], "database") == [found] == addresses(pair[1], f"user{number}"))
        host.freeflow("rm", "-f", f"user{number}")
    hosts.as_operator("delete", "vnic", "database")
    hosts.wait("it is gone", lambda: addresses(pair[1], "database") == [])


def ask(host, path):
    return Api(host).want(200, "GET", path, base="")


def metrics(host):
    lines = [line.split() for line in ask(host, "/metrics").splitlines() if line.startswith("freeflow_cluster_")]
    return {name: float(value) for name, value in lines}


def test_without_etcd_a_host_is_ready_and_says_it(hosts, pair):
    one, two = pair
    host = hosts.host(1)
    need(ask(host, "/readyz") == "ok\n", "something is wrong")
    behind = metrics(host)
    need(behind["freeflow_cluster_behind_seconds"] < 10 and behind["freeflow_cluster_problems"] == 0, f"{behind}")
    for number in HOSTS:
        hosts.etcd.kill(number)
    # Names stay, and come and go with this host's own containers.
    late = host.container("late", "--network", "red")
    need(addresses(late, "two") == [two.ip] and addresses(one, "late") == [late.ip], "names are lost")
    late.remove()
    hosts.wait("it is said", lambda: ask(host, "/readyz").startswith("ok\ncluster: nothing was heard of etcd"))
    behind = metrics(host)["freeflow_cluster_behind_seconds"]
    need(behind > 15, f"{behind}")
    need("nothing was heard of etcd" in host.freeflow("get", "hosts"), "the host's health")
    failure = hosts.as_operator("get", "vnics", codes=(1,), seconds=120)
    need("etcd" in failure, failure)
    for number in HOSTS:
        hosts.etcd.start(number)
    hosts.etcd.wait_until_healthy()
    hosts.wait("it follows again", lambda: ask(host, "/readyz") == "ok\n" and metrics(host)["freeflow_cluster_behind_seconds"] < 10)


def test_hundreds_of_objects_are_declared_in_one_call(hosts, pair):
    def text(last):
        classes = [f"kind: QosClass\nmetadata: {{name: c{number}}}\nspec: {{priority: 1}}\n" for number in range(240)]
        return "---\n".join(f"apiVersion: freeflow.io/v1\n{one}" for one in [*classes, last])
    wrong = "kind: Group\nmetadata: {name: g}\nspec: {tenant: nobody-at-all, members: [{group: none}]}\n"
    hosts.apply(text(wrong), codes=(3,))
    need("c17" not in hosts.as_operator("get", "qos"), "a part of what is wrong was declared")
    printed = hosts.apply(text("kind: Group\nmetadata: {name: g}\nspec: {tenant: red, members: [{networks: [red]}]}\n"))
    need(printed.count("created") == 241, printed)
    hosts.wait_for_all()
    need(len(json.loads(hosts.host(2).freeflow("get", "qos", "-o", "json"))["items"]) == 240, "a host has not all of them")
