#!/usr/bin/env python3
"""Two tenants with the same addresses never meet, on one host and on two; and access rules within a tenant.

What the victim has is told to the enemy, as if every guess were right at once: its address, QPNs, keys and memory.
"""

import json

import lib
import lib_cm
from lib import Failure, need
from lib_cm import wait_until

GROUP = "239.1.2.3"
NETWORK = """
apiVersion: freeflow.io/v1
kind: Network
metadata: {{name: {name}}}
spec: {{tenant: {name}, {cidrs}{more}}}
---"""
RULE = """
apiVersion: freeflow.io/v1
kind: AccessRule
metadata: {{name: {name}}}
spec: {{tenant: red, {spec}}}
---"""
SERVERS = """
apiVersion: freeflow.io/v1
kind: Group
metadata: {name: servers}
spec: {tenant: red, members: [{labels: {tier: server}}]}
---"""
CLIENT, SERVER = "from: {labels: {tier: client}}", "to: {group: servers}"
ONE_HOST = "cidrs: [10.50.0.0/24]"
PINGPONG = ["ibv_rc_pingpong", "-g", "0", "-n", "100"]
QKEY = 0x11111111
RPING_PORT = 7174
# No figure: until then something has hung.
SOON = 30


def apply(host, text):
    path = host.run_dir.parent / f"objects-{host.run_dir.name}.yaml"
    path.write_text(text)
    return host.freeflow("apply", "-f", path)


def get(host, *words):
    return json.loads(host.freeflow("get", *words, "-o", "json"))


# ---- two tenants


class Victim:
    """A tenant's container that is told of everything that happens to it."""

    def __init__(self, container):
        self.container = container
        self.running = container.start(lib.program("tenants"), "stay", GROUP)
        self.qpn, self.rkey, self.memory, self.datagram_qpn = self.running.wait_for_output("ready").split()[1:5]

    def need_untouched(self):
        code = self.running.process.poll()
        need(code is None and len(self.running.output().splitlines()) == 1, f"touched ({code}):\n{self.running.output()}")

    def stop(self):
        self.need_untouched()
        self.container.exec("pkill", "-TERM", "-x", "tenants")
        code = self.running.wait(SOON)
        need(code == 0 and "untouched" in self.running.output(), f"touched ({code}):\n{self.running.output()}")


def undeliverable(container):
    """Requests for which there was nobody in the sender's network, as its own router counts them."""
    return container.host.status()["counters"]["undeliverable"]


def attempts(host, *words):
    """Lines of the audit log about what was tried and leads nowhere."""
    lines = [json.loads(line) for line in (host.run_dir / "audit.log").read_text().splitlines()]
    return [line for line in lines if line.get("what") in words]


def vnic_of(container):
    return next(item["metadata"]["name"] for item in get(container.host, "vnics")["items"]
                if item["status"]["title"] == container.name)


def need_noted(enemy, what, target="blue", where=None, peer=""):
    """The attempt is in an audit log: who, of which tenant and network, towards what of whom. (A line of the same vNIC and kind
    comes at once, or ten seconds after the one before.)"""
    host, vnic = where or enemy.host, vnic_of(enemy)

    def found():
        return any(line["event"] == "enforced" and line["vnic"] == vnic and line["tenant"] == "red" and line["rule"] == "Network red"
                   and line.get("targetNetwork", "") == target and line["count"] > 0 and peer in line["peer"]
                   for line in attempts(host, what))
    wait_until(found, lambda: f"no {what!r} by {vnic} towards {target!r} in audit.log: {attempts(host, what)}",
               SOON)


def queue_pairs(victim, twin, enemy):
    """RC, UC and UD: its QPN, key and memory under its address and another's, and guessed QPNs."""
    before = undeliverable(enemy)
    output = enemy.exec(lib.program("wire_hostile"), "attack", victim.qpn, victim.rkey, victim.memory, victim.container.ip,
                        enemy.ip, codes=(0, 1))
    need("\n0 failed" in output, output)
    victim.need_untouched()
    count, tries = undeliverable(enemy) - before, len(output.splitlines()) - 1
    need(0 < count, "nothing is counted")
    need_noted(enemy, "message to nobody", peer=victim.container.ip)
    need_noted(enemy, "datagram to nobody", peer=victim.container.ip)
    return f"{tries} attempts, {count} requests counted"


def keys(victim, twin, enemy):
    """A good connection within the enemy's network opens nothing of the other's."""
    program = lib.program("wire_hostile")
    lib.in_two_containers(twin, enemy, [program, "keys", "server", lib.PORT],
                          [program, "keys", "client", "{ip}", lib.PORT, victim.rkey, victim.memory])
    victim.need_untouched()
    # Where the memory is.
    need_noted(enemy, "remote key refused", where=twin.host, peer=f"key {int(victim.rkey):#x}")


def spoofed(victim, twin, enemy):
    own = getattr(enemy, "gid_index", 0)
    output = enemy.exec(lib.program("tenants"), "spoof", victim.container.ip, victim.qpn, own, codes=(0, 1))
    need(output.split()[-2:] == ["0", "taken"] or "\n0 taken" in "\n" + output, output)
    victim.need_untouched()
    need_noted(enemy, "source address refused", target="")


def datagrams(victim, twin, enemy):
    before = undeliverable(enemy)
    for _ in range(3):
        enemy.exec(lib.program("wire_hostile"), "send", victim.container.ip, victim.datagram_qpn, QKEY)
    victim.need_untouched()
    wait_until(lambda: undeliverable(enemy) - before == 3, lambda: f"{undeliverable(enemy) - before} of 3 counted")


def multicast(victim, twin, enemy):
    for _ in range(3):
        enemy.exec(lib.program("tenants"), "group", GROUP)
    victim.need_untouched()
    need_noted(enemy, "multicast to nobody", target="", peer=GROUP)


def requests(victim, twin, enemy, friend):
    """A listener at the same address: only its own network reaches it."""
    ip = victim.container.ip
    with lib_cm.listening(victim.container, "rping", "-s", "-P", "-a", ip) as listener:
        for attacker in (enemy, twin):
            output = attacker.exec("rping", "-c", "-a", ip, "-C", "1", codes=(1, 255), seconds=SOON)
            need("REJECTED" in output or "UNREACHABLE" in output or "error" in output.lower(), output)
        friend.exec("rping", "-c", "-a", ip, "-C", "1", seconds=SOON)
        need(listener.process.poll() is None, listener.output())
    victim.need_untouched()
    # At the victim's own address the enemy finds its own tenant's; at one that only the other tenant has, nobody.
    output = enemy.exec("rping", "-c", "-a", friend.ip, "-C", "1", codes=(1, 255), seconds=SOON)
    need("UNREACHABLE" in output or "error" in output.lower(), output)
    need_noted(enemy, "rdma_cm request to nobody", peer=friend.ip)


def connections(victim, twin, enemy, friend):
    """A queue pair may be connected to an address of the other tenant's alone, as to any that nobody has; that is noted."""
    enemy.exec(lib.program("wire_hostile"), "attack", victim.qpn, victim.rkey, victim.memory, friend.ip, friend.ip)
    victim.need_untouched()
    need_noted(enemy, "connection to nobody", peer=friend.ip)


def floods(victim, twin, enemy, friend):
    """Whoever tries again and again gets no more lines for it, and is counted."""
    before, counted = attempts(enemy.host, "message to nobody"), undeliverable(enemy)
    for _ in range(3):
        enemy.exec(lib.program("wire_hostile"), "attack", victim.qpn, victim.rkey, victim.memory, victim.container.ip, enemy.ip)
    added = attempts(enemy.host, "message to nobody")[len(before):]
    need(undeliverable(enemy) - counted > 3 * len(added), f"a line for each attempt: {added}")
    need(all(line["count"] > 0 for line in added), added)


def meetings(checks, where, victim_at, twin, enemies, friend):
    """Everything that one tenant may try on another, by each of the enemies."""
    victim = Victim(victim_at)
    for enemy in enemies:
        for function in (queue_pairs, keys, spoofed, datagrams, multicast):
            if function is keys and enemy is twin:
                continue
            checks.check(f"{where}: {function.__name__.replace('_', ' ')} by {enemy.name}", function, victim, twin, enemy)
    for function in (requests, connections, floods):
        checks.check(f"{where}: {'rdma_cm' if function is requests else function.__name__}", function, victim, twin, enemies[0], friend)
    # What the enemy was refused, its own may do.
    checks.check(f"{where}: a datagram of its own network arrives", own_datagram, victim_at, friend)
    checks.check(f"{where}: the victim is as it was", victim.stop)


def own_datagram(victim_at, friend):
    program = lib.program("wire_hostile")
    receiver = victim_at.start(program, "receive")
    qpn = receiver.wait_for_output("ready").split()[1]
    friend.exec(program, "send", victim_at.ip, qpn, QKEY)
    need(receiver.wait(SOON) == 0, receiver.output())


def on_one_host(checks, host):
    for name in ("red", "blue"):
        apply(host, NETWORK.format(name=name, cidrs=ONE_HOST, more=""))
    victim, friend, twin, enemy = (
        host.container(f"{network}-{last}", "--network", network, "--ip", f"10.50.0.{last}")
        for network, last in (("blue", 10), ("blue", 12), ("red", 10), ("red", 11)))
    try:
        meetings(checks, "one host", victim, twin, (enemy, twin), friend)
    finally:
        for container in (victim, friend, twin, enemy):
            container.remove()
        host.freeflow("delete", "network", "red", "blue")


def part_of(host):
    return f"cidrs: [10.111.0.0/16], range: 10.111.{host.number}.0/24"


def on_two_hosts(checks):
    with lib.Lab(2) as lab:
        lab.wait_for_peers()
        for host in lab.hosts:
            for name in ("red", "blue"):
                apply(host, NETWORK.format(name=name, cidrs=part_of(host), more=""))
        victim, friend, twin, enemy = (
            lab.host(number).container(f"{network}-{number}", "--network", network, "--ip", f"10.111.{number}.{last}")
            for network, number, last in (("blue", 1, 50), ("blue", 2, 51), ("red", 1, 50), ("red", 2, 50)))
        meetings(checks, "two hosts", victim, twin, (enemy,), friend)
        rules_between(checks, *lab.hosts)


# ---- rules within a tenant


def rule(name, spec, ends=f"{CLIENT}, {SERVER}"):
    return RULE.format(name=name, spec=f"{ends}, {spec}")


def declare(host, access, *rules, cidrs=ONE_HOST):
    """These rules and no others."""
    apply(host, NETWORK.format(name="red", cidrs=cidrs, more=f", access: {access}") + SERVERS + "".join(rules))
    there = {item["metadata"]["name"] for item in get(host, "accessrules")["items"]}
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
    status = get(host, "accessrule", name)["status"]
    return status["refusalCount"], status["cutCount"]


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
    lib_cm.wait_until(lambda: server.host.status()["qp_count"] == 0, lambda: "QPs are left")


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
    """What `from` begins: requests of rdma_cm and datagrams, there and not back."""
    declare(host, "allow", rule("back", "action: deny, direction: fromTo", "from: {group: servers}, to: {labels: {tier: client}}"))
    with lib_cm.listening(server, "rping", "-s", "-P", "-a", server.ip):
        client.exec("rping", "-c", "-a", server.ip, "-C", "1", seconds=SOON)
    with lib_cm.listening(client, "rping", "-s", "-P", "-a", client.ip):
        # By an event: rping waits for its completions for ever once rdma_connect itself has failed.
        output = server.exec("rping", "-c", "-a", client.ip, "-C", "1", seconds=SOON, codes=(1, 255))
        need("UNREACHABLE, error -1" in output, output)
        for words in (["rdma_client", "-s", client.ip, "-p", RPING_PORT], ["rstream", "-s", client.ip, "-p", RPING_PORT]):
            output = server.exec(*words, seconds=SOON, codes=(1, 255))
            need("not permitted" in output, output)
    need_refused(host, "rdma_cm request refused", "back")
    own_datagram(server, client)
    program = lib.program("wire_hostile")
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
    client.exec(lib.program("tenants"), "group", GROUP)
    need_refused(host, "multicast refused", "quiet")
    member.stop()
    member = Victim(server)
    other.exec(lib.program("tenants"), "group", GROUP)
    member.running.wait_for_output("datagram")
    member.running.kill()


def withdrawn(host, server, client, words):
    """While perftest runs: both ends end by themselves, with an error."""
    declare(host, "deny", rule("while", "action: allow"))
    cuts = sum(line["count"] for line in audited(host, "connection cut", "while (withdrawn)"))
    there = server.start(*words)
    server.wait_for_port(there)
    here = client.start(*words, server.ip)
    # (Who is only written to needs no RTS.)
    wait_until(lambda: sorted(row["state"] for row in qps(host)) in (["RTR", "RTS"], ["RTS", "RTS"]),
               lambda: f"not connected: {qps(host)}\n{here.output()}")
    # Rules that stay the same, and others that come, disturb nothing.
    declare(host, "deny", rule("while", "action: allow"), rule("more", "action: allow, order: 3"))
    host.freeflow("delete", "accessrule", "more")
    need(here.process.poll() is None, f"it was cut too early:\n{here.output()}")
    host.freeflow("delete", "accessrule", "while")
    for side in (here, there):
        code = side.wait(SOON)
        need(code != 0, f"it ended well:\n{side.output()}")
    wait_until(lambda: sum(line["count"] for line in audited(host, "connection cut", "while (withdrawn)")) >= cuts + 2,
               "both ends are not in audit.log")
    wait_until(lambda: not qps(host), "QPs are left")


def qps(host):
    return json.loads(host.freeflow("ps", "--qps", "-o", "json"))


class Idle:
    """A connection with nothing on it."""

    def __init__(self, server, client):
        program = lib.program("tenants")
        self.ends = [server.start(program, "idle", "server", lib.PORT)]
        server.wait_for_port(self.ends[0])
        self.ends.append(client.start(program, "idle", "client", server.ip, lib.PORT))
        for end in self.ends:
            end.wait_for_output("connected")

    def need_cut(self):
        for end in self.ends:
            code = end.wait(SOON)
            need(code == 0 and "\ncut" in end.output(), f"not in error ({code}):\n{end.output()}")


def denied_later(host, server, client, other):
    """A rule that comes cuts what it denies, counts it, and leaves the rest alone."""
    declare(host, "allow")
    idle = Idle(server, client)
    declare(host, "allow", rule("now", "action: deny"))
    idle.need_cut()
    wait_until(lambda: counts(host, "now")[1] >= 2, lambda: f"not two ends are counted: {counts(host, 'now')}")
    need_refused(host, "connection cut", "now")
    idle = Idle(server, other)
    declare(host, "allow", rule("now", "action: deny"), rule("again", "action: deny, order: 1"))
    need(all(end.process.poll() is None for end in idle.ends), "another connection was cut")
    for end in idle.ends:
        end.kill()


def relabelled(host, server, client, other):
    """Labels that change while a connection stands cut it, and let it be made again."""
    declare(host, "deny", rule("clients", "action: allow"))
    idle = Idle(server, client)
    label(host, client, "other")
    idle.need_cut()
    need(not connects(server, client), "the old label still holds")
    label(host, client, "client")
    need(connects(server, client), "the new label does not hold")


def label(host, container, tier):
    vnic = next(item for item in get(host, "vnics")["items"] if item["status"]["title"] == container.name)
    vnic["metadata"] = {"name": vnic["metadata"]["name"], "labels": vnic["metadata"]["labels"] | {"tier": tier}}
    del vnic["status"]
    apply(host, json.dumps(vnic))


# ---- rules between hosts: each decides by its own, with the labels that the other announces


def denied_from_elsewhere(one, two, server, client, other):
    """A rule chooses a vNIC of another host by its labels; whoever has others there is let in, and it is when the rule goes."""
    declare(one, "allow", rule("not-from-there", "action: deny"), cidrs=part_of(one))
    need(not connects(server, client), "a vNIC of another host gets past a rule about its labels")
    need_refused(one, "connection refused", "not-from-there")
    line = audited(one, "connection refused", "not-from-there")[-1]
    need({line["vnic"], line["peer"]} == {vnic_of(server), f"::ffff:{client.ip}"}, line)
    need(connects(server, other), "one with other labels is kept out, too")
    with lib_cm.listening(server, "rping", "-s", "-P", "-a", server.ip):
        output = client.exec("rping", "-c", "-a", server.ip, "-C", "1", codes=(1, 255), seconds=SOON)
        need("REJECTED" in output, output)
    need_refused(one, "rdma_cm request refused", "not-from-there")
    declare(one, "allow", cidrs=part_of(one))
    need(connects(server, client), "the rule that is gone still holds")


def relabelled_elsewhere(one, two, server, client, other):
    """Labels that change on the other host cut what stands, at both ends, and let it be made again."""
    declare(one, "deny", rule("clients", "action: allow"), cidrs=part_of(one))
    need(not connects(server, other), "who has another label is let in")
    idle, cuts = Idle(server, client), sum(line["count"] for line in audited(one, "connection cut", "Network red"))
    label(two, client, "other")
    idle.need_cut()
    wait_until(lambda: sum(line["count"] for line in audited(one, "connection cut", "Network red")) > cuts, "it is not in audit.log")
    need(not connects(server, client), "the old label still holds")
    label(two, client, "client")
    wait_until(lambda: connects(server, client), "the new label does not hold", SOON)


def withdrawn_elsewhere(one, two, server, client, other):
    """The host whose rule goes cuts its end, and the other host's goes with it."""
    declare(one, "deny", rule("clients", "action: allow"), cidrs=part_of(one))
    idle = Idle(server, client)
    one.freeflow("delete", "accessrule", "clients")
    idle.need_cut()
    wait_until(lambda: audited(one, "connection cut", "clients (withdrawn)"), "it is not in audit.log")
    declare(one, "deny", rule("clients", "action: allow"), cidrs=part_of(one))
    need(connects(server, client), "it can't be given back")


def rules_between(checks, one, two):
    ends = [host.container(tier, "--network", "red", "--label", f"tier={tier}")
            for host, tier in ((one, "server"), (two, "client"), (two, "other"))]
    for function in (denied_from_elsewhere, relabelled_elsewhere, withdrawn_elsewhere):
        checks.check(f"rules between hosts: {function.__name__.replace('_', ' ')}", function, one, two, *ends)
        for container in ends:
            container.kill_background()


def rules(checks, host):
    apply(host, NETWORK.format(name="red", cidrs=ONE_HOST, more=""))
    server, client, other = ends = [host.container(tier, "--network", "red", "--label", f"tier={tier}")
                                    for tier in ("server", "client", "other")]
    for function in (of_a_group, of_labels, order, direction, group_of_datagrams, denied_later, relabelled):
        checks.check(f"rules: {function.__name__.replace('_', ' ')}", function, host, *ends)
        for container in ends:
            container.kill_background()
    for words in (["ib_write_bw", "-F", "-D", "60"], ["ib_send_lat", "-F", "-n", "100000000"]):
        checks.check(f"rules: withdrawn under {words[0]}", withdrawn, host, server, client, words)
        for container in ends:
            container.kill_background()


def test(checks):
    with lib.Host() as host:
        on_one_host(checks, host)
        rules(checks, host)
    on_two_hosts(checks)


if __name__ == "__main__":
    lib.main(test)
