#!/usr/bin/env python3
"""Connections by rdma_cm in large numbers, with ends that die at any moment, and with enemies beside them.

Whatever dies or is left lying, the other end gets an event in bounded time, and the router returns to what it held.
"""

import json
import sys
import time

import lib
import lib_cm
import router_death
import wire_hostile
from hostile import Healthy, beside, enemy
from lib import need

MTU = 4200
PORT = lib_cm.PORT
HALF_OPEN = 100
CYCLES = 10_000
CYCLES_BETWEEN_HOSTS = 1000
VICTIMS = 400 if lib.FULL else 60
LEARNED_SECONDS_MAX = 10.0
MEMORY_GROWTH_KIB_MAX = 4096
HOSTILE_SECONDS = 60 if lib.FULL else 8


def cm(*words):
    return [lib.program("cm"), *words]


def case(*words):
    return [lib.program("cm_cases"), *words]


def last_line(text):
    return text.strip().splitlines()[-1]


def serve_until_ended(server, running):
    """What the server saw, once it was told to end. (The signal is for the program, not for the command that carries it.)"""
    server.exec("/bin/sh", "-c", "kill -TERM $(pidof -s cm)")
    output = lib_cm.finish(running, 20)
    return last_line(output)


# ---- listeners that die


def dead_listener(server, client):
    """With requests that it has not read."""
    host = client.host
    before = host.status()["cm"]["half_open_count"]
    with lib_cm.listening(server, *cm("hold", PORT)) as listener:
        crowd = client.start(*cm("crowd", server.ip, PORT, HALF_OPEN))
        crowd.wait_for_output("connects")
        half_open = lambda: server.host.status()["cm"]["half_open_count"]
        lib_cm.wait_until(lambda: half_open() >= before + HALF_OPEN, lambda: f"only {half_open()} are half open")
        need(crowd.process.poll() is None, f"the clients did not wait:\n{crowd.output()}")
        server.exec("/bin/sh", "-c", "kill -KILL $(pidof -s cm)")
        listener.wait(20)
    try:
        return last_line(lib_cm.finish(crowd, 60))
    finally:
        crowd.kill()
        client.background.remove(crowd)


def unmodified(server, port):
    """rping ends by an event; rdma_client has a synchronous identifier."""
    return ["rping", "-c", "-a", server.ip, "-p", port, "-C", "1"], ["rdma_client", "-s", server.ip, "-p", port]


def nobody_listens(server, client):
    for words, answer in zip(unmodified(server, PORT), ("REJECTED, error 8", "refused")):
        output = client.exec(*words, codes=(1, 255), seconds=60)
        need(answer in output, output)


def cut_off(lab, server, client):
    """The listener's host is cut off, with all its half-open requests; the clients come to an end without it."""
    with lib_cm.listening(server, *cm("hold", PORT)):
        crowd = client.start(*cm("crowd", server.ip, PORT, 20))
        crowd.wait_for_output("connects")
        clients = [client.start(*words) for words in unmodified(server, PORT)]
        half_open = lambda: server.host.status()["cm"]["half_open_count"]
        lib_cm.wait_until(lambda: half_open() >= 22, lambda: f"only {half_open()} are half open")
        lab.cut(server.host.number)
        try:
            for running, answer in zip(clients, ("UNREACHABLE, error -110", "timed out")):
                need(running.wait(60) in (1, 255) and answer in running.output(), running.output())
            return last_line(lib_cm.finish(crowd, 60))
        finally:
            lab.heal(server.host.number)
            for running in (*clients, crowd):
                running.kill()
                client.background.remove(running)
            lab.wait_for_peers()


# ---- many


def cycles(server, client, count):
    with lib_cm.listening(server, *cm("serve", PORT)) as running:
        note = last_line(client.exec(*cm("cycle", server.ip, PORT, count), seconds=600))
        seen = serve_until_ended(server, running)
        need(f"{count} requests, {count} established, {count} disconnected, 0 failed, 0 open" in seen, seen)
    return note


def memory_is_as_before(host, before_kib):
    for _ in range(20):
        now_kib = lib.router_memory_kib(host)
        if now_kib - before_kib <= MEMORY_GROWTH_KIB_MAX:
            return f"{before_kib} KiB before, {now_kib} after"
        time.sleep(0.1)
    raise lib.Failure(f"the router held {before_kib} KiB before and {now_kib} KiB after")


# ---- ends that are killed at random


def killed_clients(server, client):
    with lib_cm.listening(server, *cm("serve", PORT)) as running:
        note = last_line(client.exec(*cm("victims", server.ip, PORT, VICTIMS, lib.SEED), seconds=300))
        need(" 0 refused" in note, note)
        seen = serve_until_ended(server, running)
        need(" 0 open" in seen, seen)
    return f"{note}; {seen}"


def killed_both(server, client):
    """Whatever comes is good; that nothing comes is not."""
    running = server.start(*cm("restart", PORT, lib.SEED, 60))
    try:
        lib_cm.wait_until(lambda: "listens" in running.output() or lib_cm.listener_count(server), "no server")
        note = last_line(client.exec(*cm("victims", server.ip, PORT, VICTIMS, lib.SEED + 1), seconds=300))
    finally:
        running.kill()
        server.background.remove(running)
    return note


# ---- what programs are told


def private_data(server, client):
    row = lib_cm.Row("", cm("data-server", PORT), cm("data", "{ip}", PORT), ("all right",), ("all right",))
    lib_cm.run_row(server, client, row)


def errors(server, client):
    output = client.exec(*cm("nobody", server.ip, 7999))
    need("all right" in output, output)


def neighbour_of(ip, last):
    """An address of the same network that no container has."""
    return f"{ip.rsplit('.', 1)[0]}.{last}"


def absent_address(client, ms):
    return last_line(client.exec(*case("absent", neighbour_of(client.ip, 250), ms)))


def late_address(client, host, like):
    """The container of that address begins while it is waited for."""
    ip = neighbour_of(like, 77)
    waiting = client.start(*case("late", ip, 20000))
    waiting.wait_for_output("waits")
    states = [row["state"] for row in cm_table(client.host)]
    need("ADDR_QUERY" in states, f"no identifier waits: {states}")
    late = host.container("late", "--ip", ip)
    try:
        return last_line(lib_cm.finish(waiting, 30))
    finally:
        waiting.kill()
        client.background.remove(waiting)
        late.remove()


def healed_meanwhile(lab, client):
    """The container begins while its host is cut off."""
    lab.cut(1)
    late = lab.host(1).container("late")
    waiting = client.start(*case("late", late.ip, 30000))
    try:
        waiting.wait_for_output("waits")
        lab.heal(1)
        return last_line(lib_cm.finish(waiting, 40))
    finally:
        lab.heal(1)
        waiting.kill()
        client.background.remove(waiting)
        late.remove()
        lab.wait_for_peers()


def cm_table(host):
    return json.loads(host.freeflow("ps", "--cm", "-o", "json"))["ids"]


def left_waiting(host, client):
    """Identifiers that wait for ten minutes end with their process."""
    note = last_line(client.exec(*case("leave", neighbour_of(client.ip, 250), 1500)))
    lib_cm.wait_for_none(host)
    return note


def owed_events(client, count):
    return last_line(client.exec(*case("owed", client.ip, count)))


def privileged_ports(client):
    return last_line(client.exec(*case("ports")))


def connect_error(server, client):
    with lib_cm.listening(server, *cm("serve", PORT)) as running:
        note = last_line(client.exec(*case("connect-error", server.ip, PORT)))
        seen = serve_until_ended(server, running)
        need("1 failed" in seen and " 0 open" in seen, seen)
    return note


def death_of_the_router(host, server, client):
    """Whoever waits for an event is woken."""
    with lib_cm.listening(server, *cm("serve", PORT)):
        waiting = {"a listener": server.start(*cm("wait-listening", PORT + 1)),
                   "a connection": client.start(*cm("wait", server.ip, PORT))}
        for program in waiting.values():
            program.wait_for_output("ready")
        died_ns = router_death.kill_router(host)
        notes = []
        for name, program in waiting.items():
            words = lib_cm.finish(program, 20).strip().splitlines()[-1].split()
            need(words[:2] == ["told", "RDMA_CM_EVENT_DEVICE_REMOVAL"], f"{name} was told {words}")
            seconds = (int(words[2]) - died_ns) / 1e9
            need(seconds < LEARNED_SECONDS_MAX, f"{name} learned it after {seconds:.1f} s")
            notes.append(f"{name} {seconds * 1000:.1f} ms")
            program.kill()
        return ", ".join(notes)


def connects_again(host, server, client):
    host.up()
    server.kill_background()
    client.kill_background()
    return cycles(server, client, 20)


# ---- enemies


def unread_events(host, container, address):
    """Identifiers without end, whose events pile up."""
    output = last_line(container.exec(*cm("unread", address, PORT, 5), seconds=60))
    lib_cm.wait_for_none(host)
    return output


def forged_management(lab, names, source):
    """QP 1 of a router that has no such peers outside: nothing of it comes to the connection manager."""
    host = lab.host(1)
    before, refusals = host.status()["cm"], wire_hostile.refusals(host)
    sender = lab.host(2)
    lib.run(sender.enter(*wire_hostile.FORGE, "management", source, wire_hostile.address_of(host), 1, 0, 0, wire_hostile.COUNT))
    note = wire_hostile.counted(host, names, refusals, wire_hostile.COUNT)
    after = host.status()["cm"]
    need(after["received_messages"] == before["received_messages"], f"it was heard: {before}, {after}")
    return note


def management_from_container(host, server, enemy_container):
    """A container's own UD queue pair can't speak to anybody's QP 1."""
    with lib_cm.listening(server, *cm("serve", PORT)) as running:
        before = host.status()["cm"]["received_messages"]
        output = enemy_container.exec(lib.program("wire_hostile"), "send", server.ip, 1, 0x80010000, codes=range(256))
        need(host.status()["cm"]["received_messages"] == before, f"it was heard:\n{output}")
        seen = serve_until_ended(server, running)
        need(seen.startswith("0 requests"), seen)
    return last_line(output) if output.strip() else ""


def on_one_host(checks):
    with lib.Host() as host:
        server, client = host.pair()
        before = lib.router_resources(host)
        checks.check("private data of every length", private_data, server, client)
        checks.check("errors as Linux gives them", errors, server, client)
        checks.check("an address that nobody has: 0 ms", absent_address, client, 0)
        checks.check("an address that nobody has: 300 ms", absent_address, client, 300)
        checks.check("an address that somebody gets meanwhile", late_address, client, host, client.ip)
        checks.check("1500 identifiers wait and are left", left_waiting, host, client)
        checks.check("2000 events that are owed, one after another", owed_events, client, 2000)
        checks.check("privileged ports", privileged_ports, client)
        checks.check("a queue pair that fails at the last step", connect_error, server, client)
        checks.check("a port where nobody listens", nobody_listens, server, client)
        checks.check(f"a listener dies with {HALF_OPEN} half-open requests", dead_listener, server, client)
        checks.check("nothing is left of them", lib_cm.wait_for_none, host)
        checks.check("1000 connections to warm up", cycles, server, client, 1000)
        memory_kib = lib.router_memory_kib(host)
        checks.check(f"{CYCLES} connections, one after another", cycles, server, client, CYCLES)
        checks.check("no identifier is left", lib_cm.wait_for_none, host)
        checks.check("memory is as before", memory_is_as_before, host, memory_kib)
        checks.check(f"{VICTIMS} clients, half of them killed, seed {lib.SEED}", killed_clients, server, client)
        checks.check(f"both ends killed, seed {lib.SEED}", killed_both, server, client)
        checks.check("no identifier is left of the killed", lib_cm.wait_for_none, host)
        checks.check("descriptors, mappings and objects are as before", lib.wait_for_resources, host, before)
        enemies = host.container("enemy")
        checks.check("events that nobody reads", unread_events, host, enemies, server.ip)
        healthy = Healthy(host, lib.program("load"))
        checks.check(f"requests of connection management, seed {lib.SEED}", beside, healthy, enemy, host, enemies,
                     lib.program("hostile"), "cm", "malformed_messages")
        checks.check("no identifier is left of the enemy", lib_cm.wait_for_none, host)
        checks.check("a container sends to QP 1", management_from_container, host, server, enemies)
        checks.check("the router dies", death_of_the_router, host, server, client)
        checks.check("connections after freeflow up", connects_again, host, server, client)


def on_two_hosts(checks):
    with lib.Lab(2, MTU) as lab:
        server, client = lab.pair()
        lab.wait_for_peers()
        before = [lib.router_resources(host) for host in lab.hosts]
        checks.check("two hosts: private data", private_data, server, client)
        checks.check("two hosts: errors", errors, server, client)
        checks.check("two hosts: an address that somebody gets meanwhile", late_address, client, lab.host(1),
                     server.ip)
        checks.check("two hosts: an address whose router comes back meanwhile", healed_meanwhile, lab, client)
        checks.check("two hosts: a port where nobody listens", nobody_listens, server, client)
        checks.check(f"two hosts: a listener dies with {HALF_OPEN} half-open requests", dead_listener, server, client)
        checks.check(f"two hosts: {CYCLES_BETWEEN_HOSTS} connections", cycles, server, client, CYCLES_BETWEEN_HOSTS)
        checks.check("two hosts: clients killed", killed_clients, server, client)
        checks.check("two hosts: both ends killed", killed_both, server, client)
        checks.check("two hosts: the listener's host is cut off", cut_off, lab, server, client)
        checks.check("two hosts: QP 1, forged by root under a stranger's address", forged_management, lab, ["unknown_source"],
                     wire_hostile.STRANGER)
        checks.check("two hosts: QP 1, forged by root under a peer's address", forged_management, lab,
                     ["wrong_source"], wire_hostile.address_of(lab.host(2)))
        for host, held in zip(lab.hosts, before):
            checks.check(f"two hosts: no identifier is left at {host.number}", lib_cm.wait_for_none, host)
            checks.check(f"two hosts: nothing is left in router {host.number}", lib.wait_for_resources, host, held)


def test(checks):
    wanted = sys.argv[1:]
    if not wanted or "one" in wanted:
        on_one_host(checks)
    if not wanted or "two" in wanted:
        on_two_hosts(checks)


if __name__ == "__main__":
    lib.main(test)
