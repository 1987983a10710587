"""Networks whose vNICs have an IPv6 address beside the IPv4 one: GID 2, rdma_cm, rsockets, plain IP; on one host and on two."""

import dataclasses
import json
import re

import pytest

import harness
from harness import PORT, Host, Lab, cm, need, perftest, places, rdmacm, rsocket, statuses, tenants, wire
from harness.cm import Row

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
    _, output = harness.in_two_containers(server, client, ["python3", "-c", ECHO, PORT],
                                      ["python3", "-c", ECHO, "{ip}", PORT])
    need(output.split() == ["six", server.ip], output)


def pingpong(server, client, kind):
    words = [f"ibv_{kind}_pingpong", "-g", INDEX, "-n", "300"]
    harness.in_two_containers(server, client, words, [*words, "{ip}"])


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
    harness.end_router(host)
    host.up()
    need(tenants.get(host, "vnic", "asked")["spec"]["addresses"] == vnic["spec"]["addresses"], "other addresses after a restart")
    host.freeflow("delete", "vnic", "asked")


def without_ipv6(host):
    """A kernel without IPv6: a warning, and RDMA goes by GID 2 all the same."""
    command = host.command("run", "-d", "--name", "old", "--network", "red", "--", "sleep", "infinity")
    words = [str(word) for word in command]
    script = 'mount -t tmpfs none /proc/sys && exec "$@"'
    harness.run(["unshare", "-m", "sh", "-c", script, "sh", *words])
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


class AsItIs(harness.Container):
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


@dataclasses.dataclass
class Where:
    """A network with both families on one host, or on two, and a server and a client of it."""

    hosts: list
    server: object
    client: object
    number: int  # by which the client's IPv6 address ends

    def __post_init__(self):
        self.six_server, self.six_client = Six(self.server), Six(self.client)
        self.held = [harness.router_resources(host) for host in self.hosts]

    def containers(self):
        """Of two tenants with the same addresses: the victim, its friend, its twin and an enemy."""
        if len(self.hosts) == 1:
            rows = [("blue", 0, "fd00:50::10"), ("blue", 0, "fd00:50::12"), ("red", 0, "fd00:50::10"),
                    ("red", 0, "fd00:50::11")]
        else:
            rows = [("blue", 0, "fd00:111::150"), ("blue", 1, "fd00:111::260"), ("red", 0, "fd00:111::150"),
                    ("red", 1, "fd00:111::250")]
        return [Six(self.hosts[at].container(f"{network}-{number}", "--network", network, "--ip", ip))
                for number, (network, at, ip) in enumerate(rows)]


@pytest.fixture(scope="module", params=places.ONE_OR_TWO)
def where(request):
    harness.require_commands("ibv_rc_pingpong", "ib_send_bw", "rping", "iperf3")
    if request.param == "one host":
        with Host() as host:
            declare(host, ("red", "blue"), ONE_HOST)
            yield Where([host], *(host.container(name, "--network", "red") for name in ("one", "two")), 0)
    else:
        with Lab(2, MTU) as lab:
            lab.wait_for_peers()
            for host in lab.hosts:
                declare(host, ("red", "blue"), TWO_HOSTS, f", range: 10.111.{host.number}.0/24")
            ends = (lab.host(number).container(f"end{number}", "--network", "red") for number in (1, 2))
            yield Where(lab.hosts, *ends, 2)


def test_both_addresses_are_shown(where):
    describes_both(where.client if where.number else where.server, where.number)


def test_plain_ip(where):
    plain_ip(where.six_server, where.six_client)


@pytest.mark.parametrize("kind", ["rc", "uc", "ud", "srq", "xsrq"])
def test_pingpong(where, kind):
    pingpong(where.server, where.client, kind)


def test_families_do_not_mix(where):
    mixed(where.server, where.client)


@pytest.mark.parametrize("words", [f"{words} -x {INDEX}" for words in PERFTEST])
def test_perftest(where, words):
    perftest.one(where.server, where.client, wire.patient(words.split()), where.hosts[0].run_dir)


def test_statuses(where):
    statuses.two_containers(where.six_server, where.six_client, harness.program("statuses"), [*STATUSES, "multicast"])


@pytest.mark.parametrize("row", connection_rows(), ids=lambda row: row.name)
def test_connections(where, row):
    cm.check_row(where.six_server, where.six_client, row)


def test_mckey(where):
    rdmacm.multicast((where.six_server,), where.six_client, group=GROUP)


def test_iperf3_by_the_preload_library(where):
    rsocket.iperf3(where.six_server, where.six_client)


def test_udpong(where):
    rsocket.datagrams(where.six_server, where.six_client, "s")


def test_address_of_another_is_refused(where):
    by_another_address(where.six_server, where.six_client)


@pytest.mark.parametrize("where", ["one host"], indirect=True)
def test_nothing_is_left_in_the_router(where):
    harness.wait_for_resources(where.hosts[0], where.held[0])


def test_tenants_never_meet(check, where):
    where.server.kill_background()
    if len(where.hosts) == 1:
        where.server.remove()
        where.client.remove()
    victim_at, friend, twin, enemy = containers = where.containers()
    by = {"enemy": enemy, "twin": twin}
    victim = tenants.Victim(victim_at, GROUP)
    for attempt, name in tenants.meetings(("enemy", "twin") if len(where.hosts) == 1 else ("enemy",)):
        check(f"{attempt.__name__.replace('_', ' ')} by the {name}", attempt, victim, twin, by[name])
    for attempt in (tenants.requests, tenants.connections, tenants.floods):
        check(attempt.__name__, attempt, victim, twin, enemy, friend)
    check("a datagram of its own network arrives", tenants.own_datagram, victim_at, friend)
    check("the victim is as it was", victim.stop)
    for container in containers:
        container.remove()


@pytest.mark.parametrize("where", ["one host"], indirect=True)
@pytest.mark.parametrize("promise", [rules, without_ipv6, addresses])
def test_network_with_ipv6(where, promise):
    promise(where.hosts[0])
