"""Two tenants with the same addresses never meet, on one host and on two; and access rules within a tenant.

What the victim has is given to the enemy, as if every guess were right at once: its address, QPNs, keys and memory.
"""

import dataclasses
import json

import pytest

import harness
from harness import Failure, Host, Lab, cm, need, tenants
from harness.cm import wait_until
from harness.tenants import GROUP, NETWORK, QKEY, RULE, SOON, Victim

SERVERS = """
apiVersion: freeflow.io/v1
kind: Group
metadata: {name: servers}
spec: {tenant: red, members: [{labels: {tier: server}}]}
---"""
CLIENT, SERVER = "from: {labels: {tier: client}}", "to: {group: servers}"
ONE_HOST = "cidrs: [10.50.0.0/24]"
PINGPONG = ["ibv_rc_pingpong", "-g", "0", "-n", "100"]
RPING_PORT = 7174


def part_of(host):
    return f"cidrs: [10.111.0.0/16], range: 10.111.{host.number}.0/24"


# ---- rules within a tenant


def rule(name, spec, ends=f"{CLIENT}, {SERVER}"):
    return RULE.format(name=name, spec=f"{ends}, {spec}")


def declare(host, access, *rules, cidrs=ONE_HOST):
    """These rules and no others."""
    tenants.apply(host, NETWORK.format(name="red", cidrs=cidrs, more=f", access: {access}") + SERVERS + "".join(rules))
    there = {item["metadata"]["name"] for item in tenants.get(host, "accessrules")["items"]}
    for name in there - {part.split("metadata: {name: ")[1].split("}")[0] for part in rules}:
        host.freeflow("delete", "accessrule", name)


def connects(server, client):
    """Whether two programs connect by hand; each says why not."""
    running = server.start(*PINGPONG)
    try:
        server.wait_for_port(running)
        try:
            client.exec(*PINGPONG, server.ip, seconds=SOON)
            return running.wait(SOON) == 0
        except Failure as failure:
            running.wait(SOON)
            both = f"{failure}\n{running.output()}"
            need("Failed to modify QP to RTR" in both, both)
            return False
    finally:
        running.kill()
        server.background.remove(running)


def audited(host, what, name):
    lines = [json.loads(line) for line in (host.run_dir / "audit.log").read_text().splitlines()]
    return [line for line in lines if line.get("what") == what and line.get("rule") == name]


def counts(host, name):
    status = tenants.get(host, "accessrule", name)["status"]
    return status["refusalCount"], status["disconnectionCount"]


def need_refused(host, what, name, before=0):
    """Counted by its rule, and in the audit log with both ends."""
    wait_until(lambda: len(audited(host, what, name)) > before, f"`{what}` by {name} is not in audit.log")
    line = audited(host, what, name)[-1]
    need(line["event"] == "enforced" and line["tenant"] == "red" and line["vnic"] and line["peer"], line)


def of_a_group(host, server, client, other):
    declare(host, "allow", rule("no-servers", "action: deny", "from: {}, to: {group: servers}"))
    need(not connects(server, client), "a denied group is reached")
    need(connects(other, client), "the rule is about others, too")
    need_refused(host, "connection refused", "no-servers")
    need(counts(host, "no-servers")[0] > 0, counts(host, "no-servers"))
    cm.wait_until(lambda: server.host.status()["qp_count"] == 0, lambda: "QPs are left")


def of_labels(host, server, client, other):
    declare(host, "deny", rule("clients", "action: allow"))
    need(connects(server, client), "the allowed are refused")
    need(not connects(server, other), "who has another label is let in")
    need_refused(host, "connection refused", "Network red")


def order(host, server, client, other):
    both = rule("no", "action: deny, order: 10")
    declare(host, "allow", both, rule("yes", "action: allow, order: 20"))
    need(connects(server, client), "the higher rule does not decide")
    declare(host, "allow", both, rule("yes", "action: allow, order: 10"))
    need(not connects(server, client), "of equals deny does not decide")
    declare(host, "allow", both, rule("yes", "action: allow, order: 5"))
    need(not connects(server, client), "the lower rule decides")


def direction(host, server, client, other):
    """Traffic that `from` begins: requests of rdma_cm and datagrams, there and not back."""
    declare(host, "allow", rule("back", "action: deny, direction: fromTo", "from: {group: servers}, to: {labels: {tier: client}}"))
    with cm.listening(server, "rping", "-s", "-P", "-a", server.ip):
        client.exec("rping", "-c", "-a", server.ip, "-C", "1", seconds=SOON)
    with cm.listening(client, "rping", "-s", "-P", "-a", client.ip):
        # By an event: rping waits for its completions for ever once rdma_connect itself has failed.
        output = server.exec("rping", "-c", "-a", client.ip, "-C", "1", seconds=SOON, codes=(1, 255))
        need("UNREACHABLE, error -1" in output, output)
        for words in (["rdma_client", "-s", client.ip, "-p", RPING_PORT], ["rstream", "-s", client.ip, "-p", RPING_PORT]):
            output = server.exec(*words, seconds=SOON, codes=(1, 255))
            need("not permitted" in output, output)
    need_refused(host, "rdma_cm request refused", "back")
    tenants.own_datagram(server, client)
    program = harness.program("wire_hostile")
    receiver = client.start(program, "receive")
    qpn = receiver.wait_for_output("ready").split()[1]
    server.exec(program, "send", client.ip, qpn, QKEY)
    need_refused(host, "datagram refused", "back")
    need(receiver.process.poll() is None, f"it arrived: {receiver.output()}")
    receiver.kill()
    # By hand, one of both directions is enough.
    need(connects(client, server), "a connection by hand is refused")


def group_of_datagrams(host, server, client, other):
    declare(host, "allow", rule("quiet", "action: deny"))
    member = Victim(server)
    client.exec(harness.program("tenants"), "group", GROUP)
    need_refused(host, "multicast refused", "quiet")
    member.stop()
    member = Victim(server)
    other.exec(harness.program("tenants"), "group", GROUP)
    member.running.wait_for_output("datagram")
    member.running.kill()


def withdrawn(host, server, client, words):
    """While perftest runs: both ends end by themselves, with an error."""
    declare(host, "deny", rule("while", "action: allow"))
    cuts = sum(line["count"] for line in audited(host, "connection disconnected", "while (withdrawn)"))
    there = server.start(*words)
    server.wait_for_port(there)
    here = client.start(*words, server.ip)
    # (Who is only written to needs no RTS.)
    wait_until(lambda: sorted(row["state"] for row in tenants.qps(host)) in (["RTR", "RTS"], ["RTS", "RTS"]),
               lambda: f"not connected: {tenants.qps(host)}\n{here.output()}")
    # Rules that stay the same, and others that come, disturb nothing.
    declare(host, "deny", rule("while", "action: allow"), rule("more", "action: allow, order: 3"))
    host.freeflow("delete", "accessrule", "more")
    need(here.process.poll() is None, f"it was cut too early:\n{here.output()}")
    host.freeflow("delete", "accessrule", "while")
    for side in (here, there):
        code = side.wait(SOON)
        need(code != 0, f"it ended well:\n{side.output()}")
    wait_until(lambda: sum(line["count"] for line in audited(host, "connection disconnected", "while (withdrawn)")) >= cuts + 2,
               "both ends are not in audit.log")
    wait_until(lambda: not tenants.qps(host), "QPs are left")


def denied_later(host, server, client, other):
    """A rule that comes cuts what it denies, counts it, and leaves the rest alone."""
    declare(host, "allow")
    idle = tenants.Idle(server, client)
    declare(host, "allow", rule("now", "action: deny"))
    idle.need_cut()
    wait_until(lambda: counts(host, "now")[1] >= 2, lambda: f"not two ends are counted: {counts(host, 'now')}")
    need_refused(host, "connection disconnected", "now")
    idle = tenants.Idle(server, other)
    declare(host, "allow", rule("now", "action: deny"), rule("again", "action: deny, order: 1"))
    need(all(end.process.poll() is None for end in idle.ends), "another connection was cut")
    for end in idle.ends:
        end.kill()


def relabelled(host, server, client, other):
    """Labels that change while a connection stands cut it, and let it be made again."""
    declare(host, "deny", rule("clients", "action: allow"))
    idle = tenants.Idle(server, client)
    label(host, client, "other")
    idle.need_cut()
    need(not connects(server, client), "the old label still holds")
    label(host, client, "client")
    need(connects(server, client), "the new label does not hold")


def label(host, container, tier):
    vnic = next(item for item in tenants.get(host, "vnics")["items"] if item["status"]["title"] == container.name)
    vnic["metadata"] = {"name": vnic["metadata"]["name"], "labels": vnic["metadata"]["labels"] | {"tier": tier}}
    del vnic["status"]
    tenants.apply(host, json.dumps(vnic))


# ---- rules between hosts: each decides by its own, with the labels that the other announces


def denied_from_elsewhere(one, two, server, client, other):
    """A rule chooses a vNIC of another host by its labels; whoever has others there is let in, and it is when the rule goes."""
    declare(one, "allow", rule("not-from-there", "action: deny"), cidrs=part_of(one))
    need(not connects(server, client), "a vNIC of another host gets past a rule about its labels")
    need_refused(one, "connection refused", "not-from-there")
    line = audited(one, "connection refused", "not-from-there")[-1]
    need({line["vnic"], line["peer"]} == {tenants.vnic_of(server), f"::ffff:{client.ip}"}, line)
    need(connects(server, other), "one with other labels is kept out, too")
    with cm.listening(server, "rping", "-s", "-P", "-a", server.ip):
        output = client.exec("rping", "-c", "-a", server.ip, "-C", "1", codes=(1, 255), seconds=SOON)
        need("REJECTED" in output, output)
    need_refused(one, "rdma_cm request refused", "not-from-there")
    declare(one, "allow", cidrs=part_of(one))
    need(connects(server, client), "the rule that is gone still holds")


def relabelled_elsewhere(one, two, server, client, other):
    """Labels that change on the other host cut what stands, at both ends, and let it be made again."""
    declare(one, "deny", rule("clients", "action: allow"), cidrs=part_of(one))
    need(not connects(server, other), "who has another label is let in")
    idle, cuts = tenants.Idle(server, client), sum(line["count"] for line in audited(one, "connection disconnected", "Network red"))
    label(two, client, "other")
    idle.need_cut()
    wait_until(lambda: sum(line["count"] for line in audited(one, "connection disconnected", "Network red")) > cuts, "it is not in audit.log")
    need(not connects(server, client), "the old label still holds")
    label(two, client, "client")
    wait_until(lambda: connects(server, client), "the new label does not hold", SOON)


def withdrawn_elsewhere(one, two, server, client, other):
    """The host whose rule goes cuts its end, and the other host's goes with it."""
    declare(one, "deny", rule("clients", "action: allow"), cidrs=part_of(one))
    idle = tenants.Idle(server, client)
    one.freeflow("delete", "accessrule", "clients")
    idle.need_cut()
    wait_until(lambda: audited(one, "connection disconnected", "clients (withdrawn)"), "it is not in audit.log")
    declare(one, "deny", rule("clients", "action: allow"), cidrs=part_of(one))
    need(connects(server, client), "it can't be given back")


@dataclasses.dataclass
class Parties:
    """Of two tenants whose networks have the same addresses: blue has the victim and its friend, red the others."""

    victim_at: object
    friend: object
    twin: object
    enemy: object

    def __post_init__(self):
        self.victim = Victim(self.victim_at)


@pytest.fixture(scope="module")
def on_one_host(host):
    for name in ("red", "blue"):
        tenants.apply(host, NETWORK.format(name=name, cidrs=ONE_HOST, more=""))
    containers = [host.container(f"{network}-{last}", "--network", network, "--ip", f"10.50.0.{last}")
                  for network, last in (("blue", 10), ("blue", 12), ("red", 10), ("red", 11))]
    yield Parties(*containers)
    for container in containers:
        container.remove()
    host.freeflow("delete", "network", "red", "blue")


@pytest.fixture(scope="module")
def lab():
    with Lab(2) as lab:
        lab.wait_for_peers()
        for host in lab.hosts:
            for name in ("red", "blue"):
                tenants.apply(host, NETWORK.format(name=name, cidrs=part_of(host), more=""))
        yield lab


@pytest.fixture(scope="module")
def on_two_hosts(lab):
    return Parties(*(
        lab.host(number).container(f"{network}-{number}", "--network", network, "--ip", f"10.111.{number}.{last}")
        for network, number, last in (("blue", 1, 50), ("blue", 2, 51), ("red", 1, 50), ("red", 2, 50))))


@pytest.mark.parametrize("attempt, by", tenants.meetings(("enemy", "twin")))
def test_tenants_never_meet_on_one_host(on_one_host, attempt, by):
    attempt(on_one_host.victim, on_one_host.twin, getattr(on_one_host, by))


@pytest.mark.parametrize("attempt", [tenants.requests, tenants.connections, tenants.floods])
def test_connections_do_not_cross_on_one_host(on_one_host, attempt):
    attempt(on_one_host.victim, on_one_host.twin, on_one_host.enemy, on_one_host.friend)


def test_what_its_own_may_do_on_one_host(check, on_one_host):
    check("a datagram of its own network arrives", tenants.own_datagram, on_one_host.victim_at, on_one_host.friend)
    check("the victim is as it was", on_one_host.victim.stop)


@pytest.fixture(scope="module")
def ruled():
    """A host, and a server, a client and another of one tenant, which rules are about."""
    with Host() as host:
        tenants.apply(host, NETWORK.format(name="red", cidrs=ONE_HOST, more=""))
        yield host, [host.container(tier, "--network", "red", "--label", f"tier={tier}")
                     for tier in ("server", "client", "other")]


@pytest.mark.parametrize("rule_", [of_a_group, of_labels, order, direction, group_of_datagrams, denied_later, relabelled])
def test_rules(ruled, rule_):
    host, ends = ruled
    try:
        rule_(host, *ends)
    finally:
        for container in ends:
            container.kill_background()


@pytest.mark.parametrize("words", ["ib_write_bw -F -D 60", "ib_send_lat -F -n 100000000"])
def test_rule_is_withdrawn_under(ruled, words):
    host, ends = ruled
    try:
        withdrawn(host, *ends[:2], words.split())
    finally:
        for container in ends:
            container.kill_background()


@pytest.mark.parametrize("attempt, by", tenants.meetings(("enemy",)))
def test_tenants_never_meet_on_two_hosts(on_two_hosts, attempt, by):
    attempt(on_two_hosts.victim, on_two_hosts.twin, getattr(on_two_hosts, by))


@pytest.mark.parametrize("attempt", [tenants.requests, tenants.connections, tenants.floods])
def test_connections_do_not_cross_on_two_hosts(on_two_hosts, attempt):
    attempt(on_two_hosts.victim, on_two_hosts.twin, on_two_hosts.enemy, on_two_hosts.friend)


def test_what_its_own_may_do_on_two_hosts(check, on_two_hosts):
    check("a datagram of its own network arrives", tenants.own_datagram, on_two_hosts.victim_at, on_two_hosts.friend)
    check("the victim is as it was", on_two_hosts.victim.stop)


@pytest.fixture(scope="module")
def ruled_between(lab, on_two_hosts):
    return [host.container(tier, "--network", "red", "--label", f"tier={tier}")
            for host, tier in zip((lab.host(1), lab.host(2), lab.host(2)), ("server", "client", "other"))]


@pytest.mark.parametrize("rule_", [denied_from_elsewhere, relabelled_elsewhere, withdrawn_elsewhere])
def test_rules_between_hosts(lab, ruled_between, rule_):
    try:
        rule_(*lab.hosts, *ruled_between)
    finally:
        for container in ruled_between:
            container.kill_background()
