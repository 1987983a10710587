"""A declared vNIC of a cluster goes from host to host with its address, and one host has it at a time.

The cases go in this order, on one laboratory of three hosts: what one leaves, the next one finds.
"""

import json
import os
import signal
import time

import pytest

import harness
from harness import need
from harness.cluster import HOSTS, following
from harness.settings import PORT

DECLARED = """
apiVersion: freeflow.io/v1
kind: Network
metadata: {name: red}
spec: {tenant: red, cidrs: [10.50.0.0/24, "fd00:50::/64"]}
---
apiVersion: freeflow.io/v1
kind: Vnic
metadata: {name: database, labels: {role: server}}
spec: {network: red}
---
apiVersion: freeflow.io/v1
kind: Vnic
metadata: {name: pinned}
spec: {network: red, hosts: [host1]}
"""
ADDRESS, ADDRESS6 = "10.50.0.226", "fd00:50::e2"
# Plain IP: answers whoever asks with a name.
ANSWER = """
import socket, sys
s = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
s.bind(("::", 9000))
print("ready", flush=True)
while True:
    s.sendto(sys.argv[1].encode(), s.recvfrom(100)[1])
"""
# The first answer within so many seconds.
ASK = """
import socket, sys, time
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
s = socket.socket(family, socket.SOCK_DGRAM)
s.settimeout(0.3)
end, name = time.monotonic() + float(sys.argv[2]), "nobody"
while name == "nobody" and time.monotonic() < end:
    try:
        s.sendto(b"?", (sys.argv[1], 9000))
        name = s.recv(100).decode()
    except OSError:
        pass
print(name)
"""


@pytest.fixture(scope="module")
def hosts():
    harness.require_commands("etcd", "etcdctl", "openssl", "ibv_rc_pingpong")
    with following(DECLARED, "red") as hosts:
        yield hosts


def database(hosts, number, *options):
    return hosts.host(number).container("database", "--rm", "--vnic", "database", *options)


def vnic(hosts, number, name="database"):
    items = json.loads(hosts.host(number).freeflow("get", "vnics", "-o", "json"))["items"]
    return next((item for item in items if item["metadata"]["name"] == name), None)


def holder(hosts):
    return next((n for n in HOSTS if vnic(hosts, n)), None)


def reaches(hosts, server, client, gid="0"):
    words = ["ibv_rc_pingpong", "-g", gid, "-p", PORT]
    harness.in_two_containers(server, client, words, [*words, "{ip}"])


def follower(hosts, number):
    record = json.loads((hosts.host(number).run_dir / "cluster.pid").read_text())
    return record["pid"]


def said(hosts, number):
    """What the host's follower can't do just now."""
    file = hosts.host(number).run_dir / "cluster.problems"
    return "\n".join(json.loads(file.read_text())) if file.exists() else ""


def answering(container, name):
    program = container.start("python3", "-c", ANSWER, name)
    program.wait_for_output("ready")
    return program


def answer(container, address, seconds):
    """By plain IP."""
    return container.exec("python3", "-c", ASK, address, str(seconds), seconds=60).strip()


def test_nobody_has_a_vnic_before_somebody_asks(hosts):
    need(holder(hosts) is None, "a host made it without a container")
    shown = json.loads(hosts.as_operator("get", "vnic", "database", "-o", "json"))
    need(ADDRESS in shown["spec"]["addresses"], f"{shown}")
    # It is the cluster's: a host neither declares nor deletes it.
    for words in (["run", "--rm", "--vnic", "nobodys", "--", "true"],):
        failure = hosts.host(2).freeflow(*words, codes=(125,))
        need("neither this host nor the cluster declares" in failure, failure)


def test_a_vnic_keeps_its_address_on_another_host(hosts):
    client = hosts.host(3).container("client", "--network", "red")
    labels = {}
    for number in (1, 2, 1):
        begin = time.monotonic()
        server = database(hosts, number)
        print(f"on host{number} in {time.monotonic() - begin:.2f} s")
        need(server.ip == ADDRESS, f"host{number}: {server.ip}")
        labels[number] = vnic(hosts, number)["metadata"]["labels"]
        need(labels[number]["role"] == "server", f"{labels}")
        need([n for n in HOSTS if vnic(hosts, n)] == [number], "two hosts have it")
        for gid in ("0", "2"):
            reaches(hosts, server, client, gid)
        failure = hosts.host(number).freeflow("delete", "vnic", "database", codes=(1, 5))
        need("follows a cluster" in failure, failure)
        server.remove()
    client.remove()


def test_one_that_is_in_use_is_refused_elsewhere_at_once(hosts):
    server = database(hosts, 2)
    begin = time.monotonic()
    failure = hosts.host(3).freeflow("run", "--rm", "--vnic", "database", "--", "true", codes=(125,))
    need("host2" in failure and "the container database has it" in failure, failure)
    need(time.monotonic() - begin < 8, "it took as long as a host that does not answer")
    # One that waits has it when the other ends.
    waiting = harness.Running(hosts.host(3).command("run", "--rm", "--share-host", "--vnic", "database", "--wait", "--",
                                                    "sh", "-c", "ip -o addr; sleep 1"))
    time.sleep(1)
    need(waiting.process.poll() is None, waiting.output())
    server.remove()
    need(waiting.wait(30) == 0 and ADDRESS in waiting.output(), waiting.output())
    failure = hosts.host(2).freeflow("run", "--rm", "--vnic", "pinned", "--", "true", codes=(125,))
    need("spec.hosts has no host2" in failure, failure)


def test_an_operator_moves_it_with_its_container(hosts):
    server, client = database(hosts, 3), hosts.host(2).container("client", "--network", "red")
    reaches(hosts, server, client)
    for to, word in (("host9", "no host host9"), ("host1", "is on host1; it was on host3")):
        printed = hosts.as_operator("move", "database", "--to", to, codes=(0,) if to == "host1" else (1, 3, 4))
        need(word in printed, printed)
    need(not any(row["name"] == "database" for row in hosts.host(3).containers()), "its container goes on")
    need(holder(hosts) == 1, "it is not on host 1")
    # It waits there for its container, and is nobody else's before.
    failure = hosts.host(2).freeflow("run", "--rm", "--vnic", "database", "--", "true", codes=(125,))
    need("an operator has moved it there" in failure, failure)
    server = database(hosts, 1)
    need(server.ip == ADDRESS, server.ip)
    reaches(hosts, server, client)
    server.remove()
    server = database(hosts, 2)
    server.remove()
    client.remove()
    failure = hosts.as_operator("move", "pinned", "--to", "host2", codes=(3, 5))
    need("spec.hosts has no host2" in failure, failure)


def test_a_host_that_has_not_heard_is_believed_by_nobody(hosts):
    """Its follower is stopped: so it believes that it has the vNIC, and its router goes on."""
    old, third = database(hosts, 1), hosts.host(3).container("third", "--network", "red")
    reaches(hosts, old, third)
    answering(old, "old")
    answering(third, "third")
    for address in (ADDRESS, ADDRESS6):
        need(answer(third, address, 20) == "old", f"{address} is not reached by plain IP")
    need(answer(old, third.ip, 20) == "third", "it does not reach others by plain IP")
    stopped = follower(hosts, 1)
    os.kill(stopped, signal.SIGSTOP)
    try:
        failure = hosts.as_operator("move", "database", "--to", "host2", "--seconds", "3", codes=(1,))
        need("has not let the vNIC database go within 3 s" in failure and "--force" in failure, failure)
        failure = hosts.host(2).freeflow("run", "--rm", "--vnic", "database", "--", "true", codes=(125,), seconds=30)
        need("moves it from host1 to host2" in failure, failure)
        printed = hosts.as_operator("move", "database", "--to", "host2", "--force")
        need("It was taken from host1" in printed, printed)
        new = database(hosts, 2)
        need((old.ip, new.ip) == (ADDRESS, ADDRESS), f"{old.ip} {new.ip}")
        reaches(hosts, new, third)
        # The old one reaches nobody, whoever begins.
        words = ["ibv_rc_pingpong", "-g", "0", "-p", PORT, "-n", "10"]
        server = third.start(*words)
        third.wait_for_port(server)
        printed = old.exec("timeout", "6", *words, third.ip, codes=(1, 124), seconds=40)
        need("10 iters" not in printed + server.output(), printed + server.output())
        server.kill()
        # By plain IP neither, and nobody takes it for the new one.
        answering(new, "new")
        for address in (ADDRESS, ADDRESS6):
            begin = time.monotonic()
            need(answer(third, address, 20) == "new", f"{address} is not the new one's")
            print(f"{address} by plain IP after {time.monotonic() - begin:.2f} s")
        need(answer(old, third.ip, 3) == "nobody", "the old one reaches others by plain IP")
        need(answer(new, third.ip, 20) == "third", "the new one does not")
        reaches(hosts, new, third)
    finally:
        os.kill(stopped, signal.SIGCONT)
    # It hears of it, and gives way.
    hosts.wait("host 1 has let it go", lambda: vnic(hosts, 1) is None)
    hosts.wait("its container has ended", lambda: not any(
        row["name"] == "database" for row in hosts.host(1).containers()))
    reaches(hosts, new, third)
    hosts.wait_for_all()
    new.remove()
    third.remove()


def test_a_host_that_was_cut_off_gives_way_when_it_is_back(hosts):
    old = database(hosts, 2)
    hosts.lab.cut(2)
    try:
        failure = hosts.host(3).freeflow("run", "--rm", "--vnic", "database", "--", "true", codes=(125,), seconds=60)
        need("host2" in failure and "--force" in failure, failure)
        hosts.as_operator("move", "database", "--to", "host3", "--force")
        new, client = database(hosts, 3), hosts.host(1).container("client", "--network", "red")
        reaches(hosts, new, client)
        need(vnic(hosts, 2), "a host that has heard nothing gave it up")
    finally:
        hosts.lab.heal(2)
    hosts.wait("host 2 has let it go", lambda: vnic(hosts, 2) is None)
    reaches(hosts, new, client)
    for container in (new, client):
        container.remove()
    hosts.host(2).freeflow("rm", "-f", old.name, codes=(0, 1))
    hosts.wait_for_all()


def test_without_etcd_it_starts_where_it_is_and_is_refused_elsewhere(hosts):
    need(holder(hosts) == 3, "it is not where it was last")
    for number in (1, 2):
        hosts.etcd.kill(number)
    hosts.wait("host 1 says so", lambda: "etcd" in said(hosts, 1))
    server = database(hosts, 3)
    need(server.ip == ADDRESS, server.ip)
    server.remove()
    failure = hosts.host(1).freeflow("run", "--rm", "--vnic", "database", "--", "true", codes=(125,), seconds=60)
    need("etcd does not answer" in failure, failure)
    for number in (1, 2):
        hosts.etcd.start(number)
    hosts.wait("host 1 hears of etcd", lambda: not said(hosts, 1))


def test_one_that_is_declared_no_more_goes_and_its_address_is_free_then(hosts):
    server = database(hosts, 1)
    hosts.as_operator("delete", "vnic", "database")
    hosts.wait("it is gone", lambda: holder(hosts) is None)
    hosts.wait("its container has ended", lambda: not hosts.host(1).containers())
    hosts.host(1).freeflow("rm", "-f", server.name, codes=(0, 1))
    text = DECLARED.split("---")[1].replace("database", "other").replace("network: red", f"network: red, addresses: [{ADDRESS}]")
    hosts.wait("its address is another's", lambda: "created" in hosts.apply(text))
    other = hosts.host(2).container("other", "--vnic", "other")
    need(other.ip == ADDRESS, other.ip)
    other.remove()
