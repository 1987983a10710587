"""Access rules between two networks of one tenant, on one host and on two: nothing goes across without one, all that it allows does,
and another tenant with the same addresses has no part in it.

Programs that connect by hand exchange their ends by TCP; networks have none between them, so the test carries it.
"""

import contextlib
import ctypes
import dataclasses
import json
import socket
import threading
import time

import pytest

import harness
from harness import PORT, Host, Lab, api, cm, need, perftest, places, statuses, tenants, wire
from harness.cm import Row, wait_until
from harness.tenants import GROUP, QKEY, SOON, Victim

ONE, TWO = "red1", "red2"
# Whose, and with which addresses; blue's are also red2's. A host of a lab has a part of 10.111.0.0/16.
ONE_HOST = {ONE: ("red", "10.61.0.0/24"), TWO: ("red", "10.62.0.0/24"), "blue": ("blue", "10.62.0.0/24")}
TWO_HOSTS = {ONE: ("red", "10.111.2.0/24"), TWO: ("red", "10.111.1.0/24"), "blue": ("blue", "10.111.0.0/16")}
NETWORK = """
apiVersion: freeflow.io/v1
kind: Network
metadata: {{name: {name}}}
spec: {{tenant: {tenant}, cidrs: [{cidr}]}}
---"""
RULE = """
apiVersion: freeflow.io/v1
kind: AccessRule
metadata: {{name: {name}}}
spec: {{tenant: {tenant}, {spec}}}
---"""
# It names no networks, so it allows nothing across them: neither alone nor above a rule that denies.
EVERYTHING = {"everything": "from: {}, to: {}, action: allow, order: 50"}
ACROSS = {"across": f"from: {{network: {ONE}}}, to: {{network: {TWO}}}, action: allow, order: 10"} | EVERYTHING
NOT_OTHERS = {"not-others": "from: {labels: {tier: other}}, to: {labels: {tier: server}}, action: deny"}
FIRST_ONLY = {"across": f"{ACROSS['across']}, direction: fromTo"}
# (Each is also the beginning of other names: send_rc of send_rc_srq.)
BY_HAND = ("send_rc", "send_uc", "send_ud", "one_sided_rc", "one_sided_uc", "one_sided_8_mib", "atomics")
PERFTEST = ("ib_send_bw -c XRC -F -n 200 -x 0", "ib_send_bw -R -F -n 200", "ib_write_lat -R -F -n 200", "ib_send_bw -R -c UD -F -n 200")
TRAFFIC = "ib_write_bw -R -F -D 60".split()
RPING_PORT = 7174
TRAFFIC_MESSAGES = 100
MTU = 4200  # datagrams of 4096 bytes between hosts
CLONE_NEWNET = 0x40000000


def rows():
    of = Row.of
    yield of("rping -s -a {ip} -C 10 -v -V", "rping -c -a {ip} -C 10 -v -V", "rdma-ping-9:", server_says=("rdma-ping-9:",))
    yield of("rdma_xserver -c x", "rdma_xclient -s {ip} -c x", "end 0", server_says=("end 0",))
    yield of("udaddy -c 4", "udaddy -s {ip} -c 4", "return status 0", server_says=("return status 0",))
    yield of("rstream -I 4 -C 50 -S 6400 -T b", "rstream -T b -s {ip} -I 4 -C 50 -S 6400", server_says=("custom",))


# ---- what programs exchange


def socket_in(container):
    """A TCP socket in a container's network: a thread goes there to make it."""
    libc, made = ctypes.CDLL(None, use_errno=True), []

    def make():
        with open(f"/proc/{container.pid}/ns/net") as place:
            if libc.setns(place.fileno(), CLONE_NEWNET) == 0:
                made.append(socket.socket())

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    need(made, f"nobody gets into the network of {container.name}")
    return made[0]


def carry(source, target):
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def serve(listener, server):
    while True:
        try:
            near, _ = listener.accept()
        except OSError:
            return
        far = socket_in(server)
        with contextlib.suppress(OSError):
            far.connect(("127.0.0.1", PORT))
        for ends in ((near, far), (far, near)):
            threading.Thread(target=carry, args=ends, daemon=True).start()


class ByHand:
    """A server as a client's programs get at it by TCP."""

    ip = "127.0.0.1"

    def __init__(self, container):
        self.container = container

    def __getattr__(self, name):
        return getattr(self.container, name)


@contextlib.contextmanager
def by_hand(server, client):
    """A port of the client's own leads to the server's as long as the block runs."""
    listener = socket_in(client)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((ByHand.ip, PORT))
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener, server), daemon=True)
        thread.start()
        try:
            yield ByHand(server)
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
    finally:
        listener.close()


# ---- rules


def declare(hosts, rules):
    """These rules of red's and no others."""
    for host in hosts:
        if rules:
            tenants.apply(host, "".join(RULE.format(name=name, tenant="red", spec=spec) for name, spec in rules.items()))
        for item in tenants.get(host, "accessrules")["items"]:
            if item["metadata"]["name"] not in rules:
                host.freeflow("delete", "accessrule", item["metadata"]["name"])


def noted(hosts, what, **fields):
    """Lines of the hosts' audit logs about what was refused or cut."""
    return [line for host in hosts for line in tenants.attempts(host, what)
            if line["event"] == "enforced" and all(line.get(key) == value for key, value in fields.items())]


def need_noted(hosts, what, container, **fields):
    vnic = tenants.vnic_of(container)
    wait_until(lambda: noted(hosts, what, vnic=vnic, **fields),
               lambda: f"no {what!r} by {vnic} with {fields} in audit.log: {noted(hosts, what)}", SOON)


def hosts_of(*containers):
    return list({id(container.host): container.host for container in containers}.values())


# ---- what is refused


def need_not_connected(server, client):
    """By hand, and at once: nothing is tried that could only fail later."""
    program = harness.program("statuses")
    for case in ("send_rc", "send_uc"):
        with by_hand(server, client) as near:
            running = near.start(program, "server", PORT, case)
            near.wait_for_port(running)
            output = client.exec(program, "client", near.ip, PORT, case, codes=(1,), seconds=SOON)
            code = running.wait(SOON)
            near.background.remove(running)
            output += running.output()
            need(code == 1 and "to RTR: Operation not permitted" in output, f"{case} ({code}):\n{output}")


def need_no_cm(server, client, because=("not permitted", "refused")):
    """One host says no at once, or the other one's answer is a no; of nobody's address there is no word."""
    with cm.listening(server, "rping", "-s", "-P", "-a", server.ip) as listener:
        output = client.exec("rdma_client", "-s", server.ip, "-p", RPING_PORT, codes=(1, 255), seconds=SOON)
        need(any(text in output for text in because), output)
        need(listener.process.poll() is None, listener.output())


def send(victim, sender, count=3):
    """Datagrams, to its number under its address."""
    for _ in range(count):
        sender.exec(harness.program("wire_hostile"), "send", victim.container.ip, victim.datagram_qpn, QKEY)


def nothing_without(hosts, server, client, other):
    declare(hosts, EVERYTHING)
    victim = Victim(server)
    for way in ((server, client), (client, server)):
        need_not_connected(*way)
        need_no_cm(*way)
    send(victim, client)
    victim.stop()
    # One of both judged first.
    wait_until(lambda: noted(hosts, "connection refused", tenant="red"), "no connection refused in audit.log", SOON)
    need_noted(hosts_of(client), "datagram refused", client, tenant="red", peer=f"::ffff:{server.ip}")
    wait_until(lambda: noted(hosts, "rdma_cm request refused", tenant="red"), "no rdma_cm request refused in audit.log", SOON)


def groups(hosts, server, client, other):
    """A group of one address in either network is two: a datagram stays in its own."""
    declare(hosts, ACROSS)
    apart, member = Victim(server), Victim(client)
    other.exec(harness.program("tenants"), "group", GROUP)
    member.running.wait_for_output("datagram")
    member.running.kill()
    apart.stop()


def of_labels(hosts, server, client, other):
    """A rule that names no networks denies across them, too, as far as no higher one allows."""
    declare(hosts, ACROSS | {"not-others": f"{NOT_OTHERS['not-others']}, order: 20"})
    need_not_connected(server, other)
    need_no_cm(server, other)
    exchanged(server, client, ("send_rc",))
    # (Deny goes before allow among equals.)
    declare(hosts, ACROSS | {"not-others": f"{NOT_OTHERS['not-others']}, order: 5"})
    exchanged(server, other, ("send_rc",))


def direction(hosts, server, client, other):
    """Requests and datagrams go there and not back; by hand it is the same who begins."""
    declare(hosts, FIRST_ONLY)
    victim = Victim(client)
    need_no_cm(client, server)
    send(victim, server)
    victim.stop()
    cm.check_row(server, client, next(rows()))
    tenants.own_datagram(server, client)
    exchanged(client, server, ("send_rc",))


# ---- what is allowed


def exchanged(server, client, names):
    with by_hand(server, client) as near:
        return statuses.two_containers(near, client, harness.program("statuses"), names)


def pingpong(server, client, words):
    with by_hand(server, client) as near:
        harness.in_two_containers(near, client, words, [*words, "{ip}"])


def measured(server, client, words):
    if "-R" in words:
        return perftest.one(server, client, words, server.host.run_dir)
    with by_hand(server, client) as near:
        return perftest.one(near, client, wire.patient(words), server.host.run_dir)


def modelled(server, client):
    with by_hand(server, client) as near:
        return wire.model(near, client, "-q", "4", "-n", "200", "-T", "18")


def routed(hosts, server, client):
    """By the router alone."""
    for path in ("routed", "auto"):
        for host in hosts:
            for network in (ONE, TWO):
                host.freeflow("network", "set", network, "--data-path", path)
        exchanged(server, client, ("send_rc", "one_sided_rc", "atomics"))


# ---- a rule that goes


def idle(hosts, server, client, other):
    """Connections with nothing on them, of one network and of two: those of one stay."""
    declare(hosts, ACROSS)
    with by_hand(server, client) as near:
        ends = tenants.Idle(near, client)
        own, read = Victim(other), len(enforced(server.host))
        server.host.freeflow("delete", "accessrule", "across")
        ends.need_cut()
    need_cut_noted(server, client, server, read)
    own.stop()
    need_not_connected(server, client)


@harness.steady
def under_traffic(hosts, server, client, other):
    """While perftest runs: both ends end by themselves, with an error, and the rule is named."""
    declare(hosts, ACROSS)
    ends = [server, client]
    judges = [(server, TWO)] if len(hosts) > 1 else [(server, TWO), (client, ONE)]
    counted = {end.name: counted_cuts(end, network) for end, network in judges}
    read = {end.name: len(enforced(end.host)) for end in ends}
    before = cm.listener_count(server)
    running = [server.start(*TRAFFIC)]

    def reported():
        return "\n---\n".join(each.output() for each in running)

    try:
        cm.wait_for_listener(server, running[0], before)
        sent = client.host.status()["counters"]["messages"]
        running.append(client.start(*TRAFFIC, server.ip))
        wait_until(lambda: client.host.status()["counters"]["messages"] > sent + TRAFFIC_MESSAGES
                   or running[1].process.poll() is not None, lambda: f"no traffic:\n{reported()}", SOON)
        need(all(each.process.poll() is None for each in running), f"it ended too early:\n{reported()}")
        need_shown(ends)
        server.host.freeflow("delete", "accessrule", "across")
        for each in running:
            code = each.wait(SOON)
            need(code != 0, f"it ended well:\n{reported()}")
    finally:
        for each, end in zip(running, ends):
            each.kill()
            end.background.remove(each)
    for end, network in judges:
        wait_until(lambda: counted_cuts(end, network) > counted[end.name], f"the cut of {end.name} is not counted", SOON)
        need_cut_noted(server, client, end, read[end.name])


def counted_cuts(end, network):
    """Whatever is said in the log: ends of connections that its host has cut, in that network."""
    samples = api.scrape(api.Api(end.host))
    return api.value(samples, "freeflow_policy_disconnections_total", rule="", tenant="red", network=network)


def enforced(host):
    lines = [json.loads(line) for line in (host.run_dir / "audit.log").read_text().splitlines()]
    return [line for line in lines if line["event"] == "enforced"]


def need_cut_noted(server, client, end, read):
    """After so many lines there is one of the cut, however often the vNIC was refused."""
    vnic, peer, until = tenants.vnic_of(end), client if end is server else server, time.monotonic() + SOON
    cut = {"what": "connection disconnected", "vnic": vnic, "rule": "across (withdrawn)", "peer": f"::ffff:{peer.ip}"}
    while not any(cut.items() <= line.items() for line in enforced(end.host)[read:]):
        need(time.monotonic() < until, f"the cut of {end.name} is not in audit.log: {enforced(end.host)[read:]}")
        need_not_connected(server, client)


def need_shown(ends):
    """Counts and captures of traffic know the networks of both ends."""
    for end in ends:
        rows = [row for row in tenants.qps(end.host) if row["name"] == end.name]
        need(rows and any(row["state"] in ("RTR", "RTS") for row in rows), f"{end.name} has no QP that is connected: {rows}")
        rounds = end.host.freeflow("top", "-n", "2", "-d", "0.3", "-o", "json", "--qps").splitlines()
        titles = [row["title"] for row in json.loads(rounds[-1])["vnics"]]
        need(end.name in titles, f"{end.name} is not among {titles}")


# ---- another tenant with the same addresses


def another_tenants(hosts, client, server, double, enemy):
    """Red's client finds red's at the address, whoever else has it; and nobody of blue finds red's client."""
    declare(hosts, ACROSS)
    namesake, asked = Victim(double), Victim(client)
    hostile = harness.program("wire_hostile")
    exchanged(server, client, ("send_rc", "send_ud", "one_sided_rc"))
    cm.check_row(server, client, next(rows()))
    send(namesake, client)
    client.exec(hostile, "attack", namesake.qpn, namesake.rkey, namesake.memory, double.ip, client.ip, seconds=SOON)
    namesake.need_untouched()
    enemy.exec(hostile, "attack", asked.qpn, asked.rkey, asked.memory, client.ip, double.ip, seconds=SOON)
    send(asked, enemy)
    need_noted(hosts_of(enemy), "message to nobody", enemy, tenant="blue")
    need_no_cm(client, enemy, because=("",))
    namesake.stop()
    asked.stop()
    tenants.own_datagram(double, enemy)


def of_ones_own(hosts):
    """No tenant has a rule about another's networks."""
    for host in hosts:
        path = host.run_dir.parent / f"refused-{host.run_dir.name}.yaml"
        for tenant, ends in (("blue", (TWO, ONE)), ("red", (ONE, "blue")), ("blue", (ONE, "blue"))):
            spec = f"from: {{network: {ends[0]}}}, to: {{network: {ends[1]}}}, action: allow"
            path.write_text(RULE.format(name="none", tenant=tenant, spec=spec))
            host.freeflow("apply", "-f", path, codes=(3,))


# ---- on one host, on two


def one_side_only(hosts, server, client, other):
    """Each host judges by what is declared there, and one that refuses is enough."""
    for at in range(2):
        declare(hosts[at:at + 1], ACROSS)
        declare(hosts[1 - at:2 - at], EVERYTHING)
        need_not_connected(server, client)
        need_no_cm(server, client)
        victim = Victim(server)
        send(victim, client)
        victim.stop()


def prepare(hosts, networks, ends):
    """The networks everywhere; and of each container the name, its host, its network and its address."""
    for host in hosts:
        for name, (tenant, cidr) in networks.items():
            tenants.apply(host, NETWORK.format(name=name, tenant=tenant, cidr=cidr))
    return [hosts[at].container(name, "--network", network, "--ip", ip, "--label", f"tier={name}")
            for name, at, network, ip in ends]


@dataclasses.dataclass
class Where:
    """Two networks of red's and one of blue's, on one host or on two; then neither host has a vNIC of both of red's."""

    hosts: list
    server: object
    client: object
    other: object
    double: object
    enemy: object

    def __post_init__(self):
        self.held = [harness.router_resources(host) for host in self.hosts]
        self.ends = self.hosts, self.server, self.client, self.other

    def forget(self):
        for container in (self.server, self.client, self.other, self.double, self.enemy):
            container.kill_background()


@pytest.fixture(scope="module", params=places.ONE_OR_TWO)
def place(request):
    harness.require_commands("ibv_xsrq_pingpong", "ib_send_bw", "rping", "udaddy", "rstream")
    if request.param == "one host":
        ends = (("server", 0, TWO, "10.62.0.10"), ("client", 0, ONE, "10.61.0.10"), ("other", 0, ONE, "10.61.0.11"),
                ("double", 0, "blue", "10.62.0.10"), ("enemy", 0, "blue", "10.62.0.12"))
        with Host() as host:
            yield Where([host], *prepare([host], ONE_HOST, ends))
    else:
        ends = (("server", 0, TWO, "10.111.1.50"), ("client", 1, ONE, "10.111.2.50"), ("other", 1, ONE, "10.111.2.51"),
                ("double", 0, "blue", "10.111.1.50"), ("enemy", 1, "blue", "10.111.2.52"))
        with Lab(2, MTU) as lab:
            lab.wait_for_peers()
            yield Where(lab.hosts, *prepare(lab.hosts, TWO_HOSTS, ends))


@pytest.fixture
def where(place):
    yield place
    place.forget()


@pytest.fixture
def ruled(where):
    """A rule that names both networks."""
    declare(where.hosts, ACROSS)
    return where


def test_nothing_goes_across_without_a_rule(where):
    nothing_without(*where.ends)


def test_no_rule_is_about_the_network_of_another_tenant(where):
    of_ones_own(where.hosts)


def test_statuses(ruled):
    exchanged(ruled.server, ruled.client, BY_HAND)


def test_statuses_the_other_way(ruled):
    exchanged(ruled.client, ruled.server, ("send_rc", "send_ud", "one_sided_uc"))


def test_model_of_the_memory(ruled):
    modelled(ruled.server, ruled.client)


def test_ibv_xsrq_pingpong(ruled):
    pingpong(ruled.server, ruled.client, "ibv_xsrq_pingpong -g 0 -n 300".split())


@pytest.mark.parametrize("words", PERFTEST)
def test_perftest(ruled, words):
    measured(ruled.server, ruled.client, words.split())


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_connections(ruled, row):
    cm.check_row(ruled.server, ruled.client, row)


@pytest.mark.usual_path
def test_routed(ruled):
    routed(ruled.hosts, ruled.server, ruled.client)


@pytest.mark.parametrize("place", ["two hosts"], indirect=True)
def test_rule_on_one_of_the_hosts_is_none(where):
    one_side_only(*where.ends)


@pytest.mark.parametrize("promise", [direction, of_labels, groups])
def test_rules(where, promise):
    promise(*where.ends)


def test_another_tenant_with_the_same_addresses(where):
    another_tenants(where.hosts, where.client, where.server, where.double, where.enemy)


def test_rule_is_withdrawn_from_idle_connections(where):
    idle(*where.ends)


def test_rule_is_withdrawn_under_traffic(where):
    under_traffic(*where.ends)


def test_nothing_is_left(where):
    for host, held in zip(where.hosts, where.held):
        cm.wait_for_none(host)
        harness.wait_for_resources(host, held)
