#!/usr/bin/env python3
"""Networks whose vNICs have an IPv6 address beside the IPv4 one: GID 2, rdma_cm, rsockets, plain IP; on one host and on two."""

import json
import re
import sys

import lib
import lib_cm
import perftest
import rdmacm
import rsocket
import statuses
import tenants
import wire
from lib import need
from lib_cm import Row

MTU = 4200
GROUP = "ff15::7:1"
NETWORK = """
apiVersion: freeflow.io/v1
kind: Network
metadata: {{name: {name}}}
spec: {{tenant: {name}, cidrs: [{cidrs}]{more}}}
---"""
VNIC = """
apiVersion: freeflow.io/v1
kind: Vnic
metadata: {{name: {name}}}
spec: {{network: {network}, addresses: [{addresses}]}}
---"""
ONE_HOST = '10.50.0.0/24, "fd00:50::/64"'
TWO_HOSTS = '10.111.0.0/16, "fd00:111::/64"'
INDEX = 2
PERFTEST = ("ib_send_bw -F -n 200", "ib_send_lat -F -n 200 -e", "ib_write_bw -F -n 200 -s 65537", "ib_read_lat -F -n 200",
            "ib_atomic_lat -F -n 200", "ib_send_bw -c UC -F -n 200", "ib_send_lat -c UD -F -n 200", "ib_send_bw -c XRC -F -n 200")
STATUSES = ("send_rc", "send_uc", "send_ud", "send_ud_srq", "one_sided_rc", "atomics", "rnr_exceeded", "lost_ud",
            "ud_wrong_qkey", "write_key_wrong", "retry_exceeded", "ping_pong_by_events", "address_handles")
# One TCP connection by the kernel's own IPv6, there and back.
ECHO = """
import socket, sys
if len(sys.argv) == 2:
    listener = socket.create_server(("::", int(sys.argv[1])), family=socket.AF_INET6)
    peer = listener.accept()[0]
    peer.sendall(peer.recv(100))
else:
    peer = socket.create_connection((sys.argv[1], int(sys.argv[2])), 20)
    peer.sendall(b"six")
    print(peer.recv(100).decode(), peer.getpeername()[0])
"""


class Six:
    """A container, by its IPv6 address and the GID of that."""

    gid_index = INDEX

    def __init__(self, container):
        row = next(row for row in container.host.containers() if row["name"] == container.name)
        self.container, self.ip = container, row["ip6"]

    def __getattr__(self, name):
        return getattr(self.container, name)

    def exec(self, *words, **more):
        return self.container.exec("env", f"FREEFLOW_TEST_GID_INDEX={INDEX}", *words, **more)

    def start(self, *words):
        return self.container.start("env", f"FREEFLOW_TEST_GID_INDEX={INDEX}", *words)


def connection_rows():
    of = Row.of
    yield of("rping -s -a {ip} -C 10 -v", "rping -c -a {ip} -C 10 -v", "rdma-ping-9:", server_says=("rdma-ping-9:",))
    yield of("rping -s -a ::0 -C 10 -V -S 65535", "rping -c -I {client} -a {ip} -C 10 -V -S 65535")
    yield of("rping -s -P -a {ip}", "rping -c -a {ip} -C 5 -V", stays=True, clients=3)
    yield of("ucmatose -c 4 -b {ip}", "ucmatose -s {ip} -b {client} -c 4", "return status 0")
    yield of("udaddy -c 4 -b {ip}", "udaddy -s {ip} -b {client} -c 4", "return status 0", server_says=("return status 0",))
    for mode in ("", " -T b", " -T r"):
        options = f"-I 4 -C 50 -S 6400{mode}"
        yield of(f"rstream -b {{ip}} {options}", f"rstream -s {{ip}} {options}", server_says=("custom",))
    yield of("riostream -b {ip} -I 4 -C 20 -S 6400", "riostream -s {ip} -I 4 -C 20 -S 6400", server_says=("custom",))


def describes_both(container, number):
    """Everything that shows a vNIC's addresses shows both; and its device has both GIDs, here and in sysfs."""
    six, ip = Six(container).ip, container.ip
    offset = int(ip.rsplit(".", 1)[1])
    need(six.endswith(f"::{number or ''}{offset:02x}".replace("::0", "::")), f"{six} does not stand where {ip} does")
    host = container.host
    vnics = json.loads(host.freeflow("get", "vnics", "-o", "json"))["items"]
    need([ip, six] in [vnic["spec"]["addresses"] for vnic in vnics], vnics)
    for words in (("get", "vnics"), ("ps",), ("status",), ("describe", "vnics")):
        output = host.freeflow(*words)
        need(six in output and ip in output, output)
    devinfo = container.exec("ibv_devinfo", "-v")
    gids = dict(re.findall(r"GID\[\s*(\d+)\]:\s+(\S+),", devinfo))
    need(gids == {"0": f"::ffff:{ip}", "2": six}, f"{gids}\n{devinfo}")
    in_sysfs = container.exec("sh", "-c", "cd /sys/class/infiniband/freeflow0/ports/1; cat gids/1 gids/2 gid_attrs/types/2 "
                              "gid_attrs/ndevs/2; ls gid_attrs/types")
    lines = in_sysfs.split("\n")
    need(int(lines[0].replace(":", ""), 16) == 0 and lines[2:6] == ["RoCE v2", "ff0", "0", "2"], in_sysfs)


def plain_ip(server, client):
    """At once: no duplicates are looked for."""
    shown = client.exec("ip", "-6", "address", "show", "dev", "ff0")
    need("tentative" not in shown.split(client.ip)[1].splitlines()[0], shown)
    _, output = lib.in_two_containers(server, client, ["python3", "-c", ECHO, lib.PORT],
                                      ["python3", "-c", ECHO, "{ip}", lib.PORT])
    need(output.split() == ["six", server.ip], output)


def pingpong(server, client, kind):
    words = [f"ibv_{kind}_pingpong", "-g", INDEX, "-n", "300"]
    lib.in_two_containers(server, client, words, [*words, "{ip}"])


def need_refused(server, client, *indexes):
    """Nobody is connected: by the GIDs of these indexes."""
    running = server.start("ibv_rc_pingpong", "-g", indexes[0])
    try:
        server.wait_for_port(running)
        output = client.exec("ibv_rc_pingpong", "-g", indexes[-1], server.ip, codes=(1,))
        running.wait(20)
        need("Failed to modify QP to RTR" in running.output() + output, f"{running.output()}\n{output}")
    finally:
        running.kill()
        server.background.remove(running)


def mixed(server, client):
    """One family to the other's address is refused, as no network leads there."""
    for mine, other in ((0, INDEX), (INDEX, 0)):
        need_refused(server, client, mine, other)


def by_another_address(six, other):
    """Nobody binds to what is another's."""
    output = six.exec("rping", "-s", "-a", other.ip, codes=(1, 255))
    need("bind" in output.lower(), output)


def everything(checks, where, server, client):
    six_server, six_client = Six(server), Six(client)
    checks.check(f"{where}: plain IP", plain_ip, six_server, six_client)
    for kind in ("rc", "uc", "ud", "srq", "xsrq"):
        checks.check(f"{where}: ibv_{kind}_pingpong -g {INDEX}", pingpong, server, client, kind)
    checks.check(f"{where}: families do not mix", mixed, server, client)
    for words in PERFTEST:
        words = f"{words} -x {INDEX}"
        checks.check(f"{where}: {words}", perftest.one, server, client, wire.patient(words.split()), server.host.run_dir)
    program = lib.program("statuses")
    checks.check(f"{where}: statuses", statuses.two_containers, six_server, six_client, program, [*STATUSES, "multicast"])
    for row in connection_rows():
        checks.check(f"{where}: {row.name}", lib_cm.check_row, six_server, six_client, row)
    checks.check(f"{where}: mckey", groups, six_server, six_client)
    checks.check(f"{where}: iperf3 by the preload library", rsocket.iperf3, six_server, six_client)
    checks.check(f"{where}: udpong", rsocket.datagrams, six_server, six_client, "s")
    checks.check(f"{where}: another's address", by_another_address, six_server, six_client)


def groups(member, sender):
    before, rdmacm.GROUP = rdmacm.GROUP, GROUP
    try:
        rdmacm.multicast((member,), sender)
    finally:
        rdmacm.GROUP = before


def declare(host, names, cidrs, more=""):
    for name in names:
        tenants.apply(host, NETWORK.format(name=name, cidrs=cidrs, more=more))


def addresses(host):
    """Those that are asked for, twice, and that nobody can have; and after the router died."""
    tenants.apply(host, VNIC.format(name="asked", network="red", addresses='"fd00:50::aa"'))
    vnic = tenants.get(host, "vnic", "asked")
    need(vnic["spec"]["addresses"][1] == "fd00:50::aa" and len(vnic["spec"]["addresses"]) == 2, vnic)
    path = host.run_dir.parent / "twice.yaml"
    for address in ("fd00:50::aa", "fd00:50::1", "fd00:51::5"):
        path.write_text(VNIC.format(name="twice", network="red", addresses=f'"{address}"'))
        output = host.freeflow("apply", "-f", path, codes=(3,))
        need("spec.addresses[0]" in output, output)
    lib.end_router(host)
    host.up()
    need(tenants.get(host, "vnic", "asked")["spec"]["addresses"] == vnic["spec"]["addresses"], "other addresses after a restart")
    host.freeflow("delete", "vnic", "asked")


def without_ipv6(host):
    """A kernel without IPv6: a warning, and RDMA goes by GID 2 all the same."""
    command = host.command("run", "-d", "--name", "old", "--network", "red", "--", "sleep", "infinity")
    words = [str(word) for word in command]
    script = 'mount -t tmpfs none /proc/sys && exec "$@"'
    lib.run(["unshare", "-m", "sh", "-c", script, "sh", *words])
    row = next(row for row in host.containers() if row["name"] == "old")
    log = host.freeflow("logs", "old")
    need("warning" in log and row["ip6"] in log, log)
    old = AsItIs(host, row)
    try:
        other = host.container("other", "--network", "red")
        need("fd00:50" not in old.exec("ip", "-6", "address"), "it has the address")
        pingpong(old, other, "rc")
        other.remove()
    finally:
        old.remove()


class AsItIs(lib.Container):
    """A container that is there."""

    def __init__(self, host, row):
        self.host, self.name, self.ip, self.pid, self.background = host, row["name"], row["ip"], int(row["pid"]), []


RULE = "from: {cidr: \"fd00:50::/120\"}, to: {cidr: \"fd00:50::/120\"}, action: deny"


def rules(host):
    """A rule that names IPv6 addresses is about the vNICs that have them, whichever they speak by."""
    tenants.apply(host, tenants.RULE.format(name="six", spec=RULE))
    server, client = (host.container(name, "--network", "red") for name in ("rule-server", "rule-client"))
    try:
        for index in (0, INDEX):
            need_refused(server, client, index)
        host.freeflow("delete", "accessrule", "six")
        pingpong(server, client, "rc")
    finally:
        server.remove()
        client.remove()


def on_one_host(checks):
    with lib.Host() as host:
        declare(host, ("red", "blue"), ONE_HOST)
        server, client = (host.container(name, "--network", "red") for name in ("one", "two"))
        before = lib.router_resources(host)
        checks.check("one host: both addresses are shown", describes_both, server, 0)
        everything(checks, "one host", server, client)
        checks.check("one host: nothing is left in the router", lib.wait_for_resources, host, before)
        server.remove()
        client.remove()
        victim, friend, twin, enemy = (
            Six(host.container(f"{network}-{last}", "--network", network, "--ip", f"fd00:50::{last}"))
            for network, last in (("blue", 10), ("blue", 12), ("red", 10), ("red", 11)))
        tenants.GROUP = GROUP
        tenants.meetings(checks, "one host", victim, twin, (enemy, twin), friend)
        for container in (victim, friend, twin, enemy):
            container.remove()
        checks.check("one host: rules", rules, host)
        checks.check("one host: a kernel without IPv6", without_ipv6, host)
        checks.check("one host: addresses that are asked for", addresses, host)


def on_two_hosts(checks):
    with lib.Lab(2, MTU) as lab:
        lab.wait_for_peers()
        for host in lab.hosts:
            declare(host, ("red", "blue"), TWO_HOSTS, f", range: 10.111.{host.number}.0/24")
        server, client = (lab.host(number).container(f"end{number}", "--network", "red") for number in (1, 2))
        checks.check("two hosts: both addresses are shown", describes_both, client, 2)
        everything(checks, "two hosts", server, client)
        victim, friend, twin, enemy = (
            Six(lab.host(number).container(f"{network}-{number}", "--network", network, "--ip", f"fd00:111::{number}{last}"))
            for network, number, last in (("blue", 1, 50), ("blue", 2, 60), ("red", 1, 50), ("red", 2, 50)))
        tenants.GROUP = GROUP
        tenants.meetings(checks, "two hosts", victim, twin, (enemy,), friend)


def test(checks):
    lib.require_commands("ibv_rc_pingpong", "ib_send_bw", "rping", "iperf3")
    wanted = sys.argv[1:]
    if not wanted or "one" in wanted:
        on_one_host(checks)
    if not wanted or "two" in wanted:
        on_two_hosts(checks)


if __name__ == "__main__":
    lib.main(test)
