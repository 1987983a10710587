"""Connections by rdma_cm in large numbers, with ends that die at any moment, and with enemies beside them.

Whatever dies or is left lying, the other end gets an event in bounded time, and the router returns to what it held.
"""

import json
import time

import pytest

import harness
from harness import Failure, cm, forgery, need
from harness.enemies import Healthy, beside, enemy
from harness.settings import FULL, SEED

PORT = cm.PORT
HALF_OPEN = 100
CYCLES = 10_000
CYCLES_BETWEEN_HOSTS = 1000
VICTIMS = 400 if FULL else 60
LEARNED_SECONDS_MAX = 10.0
MEMORY_GROWTH_KIB_MAX = 4096
HOSTILE_SECONDS = 60 if FULL else 8


def program(*words):
    return [harness.program("cm"), *words]


def case(*words):
    return [harness.program("cm_cases"), *words]


def last_line(text):
    return text.strip().splitlines()[-1]


def serve_until_ended(server, running):
    """The server's counts, once it has ended. (The signal is for the program, not for the command that carries it.)"""
    server.exec("/bin/sh", "-c", "kill -TERM $(pidof -s cm)")
    output = cm.finish(running, 20)
    return last_line(output)


# ---- listeners that die


def dead_listener(server, client):
    """With requests that it has not read."""
    host = client.host
    before = host.status()["cm"]["half_open_count"]
    with cm.listening(server, *program("hold", PORT)) as listener:
        crowd = client.start(*program("crowd", server.ip, PORT, HALF_OPEN))
        crowd.wait_for_output("connects")
        half_open = lambda: server.host.status()["cm"]["half_open_count"]
        cm.wait_until(lambda: half_open() >= before + HALF_OPEN, lambda: f"only {half_open()} are half open")
        need(crowd.process.poll() is None, f"the clients did not wait:\n{crowd.output()}")
        server.exec("/bin/sh", "-c", "kill -KILL $(pidof -s cm)")
        listener.wait(20)
    try:
        return last_line(cm.finish(crowd, 60))
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
    with cm.listening(server, *program("hold", PORT)):
        crowd = client.start(*program("crowd", server.ip, PORT, 20))
        crowd.wait_for_output("connects")
        clients = [client.start(*words) for words in unmodified(server, PORT)]
        half_open = lambda: server.host.status()["cm"]["half_open_count"]
        cm.wait_until(lambda: half_open() >= 22, lambda: f"only {half_open()} are half open")
        lab.cut(server.host.number)
        try:
            for running, answer in zip(clients, ("UNREACHABLE, error -110", "timed out")):
                need(running.wait(60) in (1, 255) and answer in running.output(), running.output())
            return last_line(cm.finish(crowd, 60))
        finally:
            lab.heal(server.host.number)
            for running in (*clients, crowd):
                running.kill()
                client.background.remove(running)
            lab.wait_for_peers()


# ---- many


def cycles(server, client, count):
    with cm.listening(server, *program("serve", PORT)) as running:
        note = last_line(client.exec(*program("cycle", server.ip, PORT, count), seconds=600))
        seen = serve_until_ended(server, running)
        need(f"{count} requests, {count} established, {count} disconnected, 0 failed, 0 open" in seen, seen)
    return note


def memory_is_as_before(host, before_kib):
    for _ in range(20):
        now_kib = harness.router_memory_kib(host)
        if now_kib - before_kib <= MEMORY_GROWTH_KIB_MAX:
            return f"{before_kib} KiB before, {now_kib} after"
        time.sleep(0.1)
    raise Failure(f"the router held {before_kib} KiB before and {now_kib} KiB after")


# ---- ends that are killed at random


def killed_clients(server, client):
    with cm.listening(server, *program("serve", PORT)) as running:
        note = last_line(client.exec(*program("victims", server.ip, PORT, VICTIMS, SEED), seconds=300))
        need(" 0 refused" in note, note)
        seen = serve_until_ended(server, running)
        need(" 0 open" in seen, seen)
    return f"{note}; {seen}"


def killed_both(server, client):
    """Whatever comes is good; that nothing comes is not."""
    running = server.start(*program("restart", PORT, SEED, 60))
    try:
        cm.wait_until(lambda: "listens" in running.output() or cm.listener_count(server), "no server")
        note = last_line(client.exec(*program("victims", server.ip, PORT, VICTIMS, SEED + 1), seconds=300))
    finally:
        running.kill()
        server.background.remove(running)
    return note


# ---- what programs are notified of


def private_data(server, client):
    row = cm.Row("", program("data-server", PORT), program("data", "{ip}", PORT), ("all right",), ("all right",))
    cm.run_row(server, client, row)


def errors(server, client):
    output = client.exec(*program("nobody", server.ip, 7999))
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
        return last_line(cm.finish(waiting, 30))
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
        return last_line(cm.finish(waiting, 40))
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
    cm.wait_for_none(host)
    return note


def owed_events(client, count):
    return last_line(client.exec(*case("owed", client.ip, count)))


def privileged_ports(client):
    return last_line(client.exec(*case("ports")))


def connect_error(server, client):
    with cm.listening(server, *program("serve", PORT)) as running:
        note = last_line(client.exec(*case("connect-error", server.ip, PORT)))
        seen = serve_until_ended(server, running)
        need("1 failed" in seen and " 0 open" in seen, seen)
    return note


def death_of_the_router(host, server, client):
    """Whoever waits for an event is woken."""
    with cm.listening(server, *program("serve", PORT)):
        waiting = {"a listener": server.start(*program("wait-listening", PORT + 1)),
                   "a connection": client.start(*program("wait", server.ip, PORT))}
        for waiter in waiting.values():
            waiter.wait_for_output("ready")
        died_ns = harness.kill_router(host)
        notes = []
        for name, waiter in waiting.items():
            words = cm.finish(waiter, 20).strip().splitlines()[-1].split()
            need(words[:2] == ["event", "RDMA_CM_EVENT_DEVICE_REMOVAL"], f"{name} reported {words}")
            seconds = (int(words[2]) - died_ns) / 1e9
            need(seconds < LEARNED_SECONDS_MAX, f"{name} learned it after {seconds:.1f} s")
            notes.append(f"{name} {seconds * 1000:.1f} ms")
            waiter.kill()
        return ", ".join(notes)


def connects_again(host, server, client):
    host.up()
    server.kill_background()
    client.kill_background()
    return cycles(server, client, 20)


# ---- enemies


def unread_events(host, container, address):
    """Identifiers without end, whose events pile up."""
    output = last_line(container.exec(*program("unread", address, PORT, 5), seconds=60))
    cm.wait_for_none(host)
    return output


def forged_management(lab, names, source):
    """QP 1 of a router that has no such peers outside: nothing of it comes to the connection manager."""
    host = lab.host(1)
    before, refusals = host.status()["cm"], forgery.refusals(host)
    sender = lab.host(2)
    harness.run(sender.enter(*forgery.FORGE, "management", source, forgery.address_of(host), 1, 0, 0, forgery.COUNT))
    note = forgery.counted(host, names, refusals, forgery.COUNT)
    after = host.status()["cm"]
    need(after["received_messages"] == before["received_messages"], f"it was heard: {before}, {after}")
    return note


def management_from_container(host, server, enemy_container):
    """A container's own UD queue pair can't speak to anybody's QP 1."""
    with cm.listening(server, *program("serve", PORT)) as running:
        before = host.status()["cm"]["received_messages"]
        output = enemy_container.exec(harness.program("wire_hostile"), "send", server.ip, 1, 0x80010000, codes=range(256))
        need(host.status()["cm"]["received_messages"] == before, f"it was heard:\n{output}")
        seen = serve_until_ended(server, running)
        need(seen.startswith("0 requests"), seen)
    return last_line(output) if output.strip() else ""


@pytest.fixture(scope="module")
def held(host, pair):
    return harness.router_resources(host)


@pytest.fixture(scope="module")
def enemy_container(host, held):
    return host.container("enemy")


def test_private_data_of_every_length(server, client, held):
    private_data(server, client)


def test_errors_as_linux_gives_them(server, client, held):
    errors(server, client)


@pytest.mark.parametrize("wait_ms", [0, 300])
def test_address_that_nobody_has(client, wait_ms, held):
    absent_address(client, wait_ms)


def test_address_that_somebody_gets_meanwhile(host, client, held):
    late_address(client, host, client.ip)


def test_identifiers_wait_and_are_left(host, client, held):
    left_waiting(host, client)


def test_events_that_are_owed_one_after_another(client, held):
    owed_events(client, 2000)


def test_privileged_ports(client, held):
    privileged_ports(client)


def test_queue_pair_that_fails_at_the_last_step(server, client, held):
    connect_error(server, client)


def test_port_where_nobody_listens(server, client, held):
    nobody_listens(server, client)


def test_listener_dies_with_half_open_requests(host, server, client, held):
    dead_listener(server, client)
    cm.wait_for_none(host)


def test_many_connections_one_after_another(check, host, server, client, held):
    check("1000 connections to warm up", cycles, server, client, 1000)
    memory_kib = harness.router_memory_kib(host)
    check(f"{CYCLES} connections, one after another", cycles, server, client, CYCLES)
    check("no identifier is left", cm.wait_for_none, host)
    check("memory is as before", memory_is_as_before, host, memory_kib)


def test_killed_clients(server, client, held):
    killed_clients(server, client)


def test_both_ends_killed(server, client, held):
    killed_both(server, client)


def test_nothing_is_left_of_the_killed(host, held):
    cm.wait_for_none(host)
    harness.wait_for_resources(host, held)


def test_events_that_nobody_reads(host, enemy_container, server, held):
    unread_events(host, enemy_container, server.ip)


def test_nonsense_requests_beside_a_healthy_pair(host, enemy_container, held):
    beside(Healthy(host, harness.program("load")), enemy, host, enemy_container, harness.program("hostile"), "cm",
           "malformed_messages")
    cm.wait_for_none(host)


def test_container_does_not_reach_qp_1(host, server, enemy_container, held):
    management_from_container(host, server, enemy_container)


def test_router_dies(host, server, client, held):
    death_of_the_router(host, server, client)


def test_connections_after_freeflow_up(host, server, client, held):
    connects_again(host, server, client)


# ---- on two hosts


@pytest.fixture(scope="module")
def two(lab):
    """The server and the client, each on its own host."""
    return lab.pair()


@pytest.fixture(scope="module")
def held_by_each(lab, two):
    return [harness.router_resources(host) for host in lab.hosts]


@pytest.mark.parametrize("promise", [private_data, errors, nobody_listens, dead_listener, killed_clients, killed_both])
def test_between_two_hosts(two, held_by_each, promise):
    promise(*two)


def test_address_that_somebody_gets_meanwhile_elsewhere(lab, two, held_by_each):
    late_address(two[1], lab.host(1), two[0].ip)


def test_address_whose_router_comes_back_meanwhile(lab, two, held_by_each):
    healed_meanwhile(lab, two[1])


def test_connections_between_two_hosts(two, held_by_each):
    cycles(*two, CYCLES_BETWEEN_HOSTS)


def test_host_of_the_listener_is_cut_off(lab, two, held_by_each):
    cut_off(lab, *two)


@pytest.mark.parametrize("names, source", [(["unknown_source"], forgery.STRANGER), (["wrong_source"], None)],
                         ids=["under a strange address", "under a peer's address"])
def test_qp_1_forged_by_root(lab, two, held_by_each, names, source):
    forged_management(lab, names, source or forgery.address_of(lab.host(2)))


def test_nothing_is_left_on_two_hosts(lab, two, held_by_each):
    for host, before in zip(lab.hosts, held_by_each):
        cm.wait_for_none(host)
        harness.wait_for_resources(host, before)
