"""Two tenants with the same addresses: a victim, what an enemy tries on it, and where that is noted.

What the victim has is given to the enemy, as if every guess were right at once: its address, QPNs, keys and memory.
"""

import json

from harness import cm
from harness.cm import wait_until
from harness.failure import need
from harness.host import in_two_containers
from harness.programs import program
from harness.settings import PORT

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
QKEY = 0x11111111
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
    """A tenant's container that notes everything that happens to it."""

    def __init__(self, container, group=GROUP):
        self.container, self.group = container, group
        self.running = container.start(program("tenants"), "stay", group)
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
    output = enemy.exec(program("wire_hostile"), "attack", victim.qpn, victim.rkey, victim.memory, victim.container.ip,
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
    path = program("wire_hostile")
    in_two_containers(twin, enemy, [path, "keys", "server", PORT],
                          [path, "keys", "client", "{ip}", PORT, victim.rkey, victim.memory])
    victim.need_untouched()
    # Where the memory is.
    need_noted(enemy, "remote key refused", where=twin.host, peer=f"key {int(victim.rkey):#x}")


def spoofed(victim, twin, enemy):
    own = getattr(enemy, "gid_index", 0)
    output = enemy.exec(program("tenants"), "spoof", victim.container.ip, victim.qpn, own, codes=(0, 1))
    need(output.split()[-2:] == ["0", "taken"] or "\n0 taken" in "\n" + output, output)
    victim.need_untouched()
    need_noted(enemy, "source address refused", target="")


def datagrams(victim, twin, enemy):
    before = undeliverable(enemy)
    for _ in range(3):
        enemy.exec(program("wire_hostile"), "send", victim.container.ip, victim.datagram_qpn, QKEY)
    victim.need_untouched()
    wait_until(lambda: undeliverable(enemy) - before == 3, lambda: f"{undeliverable(enemy) - before} of 3 counted")


def multicast(victim, twin, enemy):
    for _ in range(3):
        enemy.exec(program("tenants"), "group", victim.group)
    victim.need_untouched()
    need_noted(enemy, "multicast to nobody", target="", peer=victim.group)


def requests(victim, twin, enemy, friend):
    """A listener at the same address: only its own network reaches it."""
    ip = victim.container.ip
    with cm.listening(victim.container, "rping", "-s", "-P", "-a", ip) as listener:
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
    enemy.exec(program("wire_hostile"), "attack", victim.qpn, victim.rkey, victim.memory, friend.ip, friend.ip)
    victim.need_untouched()
    need_noted(enemy, "connection to nobody", peer=friend.ip)


def floods(victim, twin, enemy, friend):
    """Whoever tries again and again gets no more lines for it, and is counted."""
    before, counted = attempts(enemy.host, "message to nobody"), undeliverable(enemy)
    for _ in range(3):
        enemy.exec(program("wire_hostile"), "attack", victim.qpn, victim.rkey, victim.memory, victim.container.ip, enemy.ip)
    added = attempts(enemy.host, "message to nobody")[len(before):]
    need(undeliverable(enemy) - counted > 3 * len(added), f"a line for each attempt: {added}")
    need(all(line["count"] > 0 for line in added), added)


def own_datagram(victim_at, friend):
    path = program("wire_hostile")
    receiver = victim_at.start(path, "receive")
    qpn = receiver.wait_for_output("ready").split()[1]
    friend.exec(path, "send", victim_at.ip, qpn, QKEY)
    need(receiver.wait(SOON) == 0, receiver.output())


def qps(host):
    return json.loads(host.freeflow("ps", "--qps", "-o", "json"))


class Idle:
    """A connection with nothing on it."""

    def __init__(self, server, client):
        path = program("tenants")
        self.ends = [server.start(path, "idle", "server", PORT)]
        server.wait_for_port(self.ends[0])
        self.ends.append(client.start(path, "idle", "client", server.ip, PORT))
        for end in self.ends:
            end.wait_for_output("connected")

    def need_cut(self):
        for end in self.ends:
            code = end.wait(SOON)
            need(code == 0 and "\ncut" in end.output(), f"not in error ({code}):\n{end.output()}")


def meetings(enemies):
    """(function, name of the enemy): what one tenant may try on another; `twin` has the victim's address."""
    for enemy in enemies:
        for function in (queue_pairs, keys, spoofed, datagrams, multicast):
            if not (function is keys and enemy == "twin"):
                yield function, enemy
