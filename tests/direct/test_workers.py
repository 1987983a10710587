"""Several workers: which vNIC is where, what they copy, and that they touch nothing that was taken back.

The rounds of tests/programs/copy_threads.c, several pairs at once, beside processes that are killed and memory that is re-mapped; everything by the
router. `--workers` runs any other suite with several workers that copy all they can.
"""

import json
import pathlib
import time

import pytest

import harness
from harness import PORT, Host, need, paths
from harness.settings import FULL, SEED

SECONDS = 30 if FULL else 4
PAIRS = 2
WORKER_COUNT = 3


def command(host, *words, code=0):
    return host.freeflow(*words, codes=(code,))


def refuses_options(host):
    for bad in ("0", "33", "-1", "many", ""):
        output = command(host, "up", f"--workers={bad}", code=2)
        need("1 to 32, or auto" in output, f"--workers={bad}: {output}")
    output = command(host, "up", "--workers", 2, code=1)
    need(f"up with {WORKER_COUNT} workers" in output, output)
    command(host, "up", "--workers", WORKER_COUNT)
    command(host, "up")


def shown(host, containers):
    status = host.status()
    need(status["worker_count"] == WORKER_COUNT, str(status))
    where = {vnic["name"]: vnic["worker"] for vnic in status["vnics"]}
    need(sorted(where.values()) == sorted(1 + at % WORKER_COUNT for at in range(len(containers))), str(where))
    text = host.freeflow("status")
    need(f", {WORKER_COUNT} workers" in text and "WORKER" in text, text)
    threads = pathlib.Path(f"/proc/{host.router_pid()}/task")
    names = [(thread / "comm").read_text().strip() for thread in threads.iterdir()]
    need(sum(name.startswith("ff-copy") for name in names) == WORKER_COUNT, str(names))
    return json.dumps(where)


def rounds(pairs, program, beside=None):
    """All pairs at once."""
    servers, clients = [], []
    for at, (server, client) in enumerate(pairs):
        seed = SEED + at
        servers.append(server.start(program, seed, SECONDS, "server", PORT))
        server.wait_for_port(servers[-1])
        clients.append(client.start(program, seed, SECONDS, "client", server.ip, PORT))
    note = beside() if beside else ""
    for running in clients + servers:
        code = running.wait(SECONDS + 60)
        need(code == 0, f"{code}: {running.output()}")
    return "; ".join(client.output().strip() for client in clients) + note


def killed_meanwhile(server, client, kill):
    count = 40 * SECONDS
    _, output = harness.in_two_containers(
        server, client, [kill, "server", PORT, SEED, count], [kill, "client", "{ip}", PORT, SEED, count],
        seconds=30 + count)
    need("; 0 wrong" in output, output)
    return f"; beside them {count} killed"


def moved(host, before):
    more = host.status()["moved_bytes"] - before
    need(more > 1 << 24, f"the workers copied {more} bytes")
    return f"{more >> 20} MiB"


def idle(host):
    """Nothing is to be done: no thread of the router uses any time."""
    def ticks():
        fields = pathlib.Path(f"/proc/{host.router_pid()}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])
    for last in (False, False, True):
        time.sleep(1)
        before = ticks()
        time.sleep(2)
        used = ticks() - before
        if used <= 2:
            break
        need(not last, f"{used} ticks in two seconds")


def alone(program):
    """One worker is the router's own: there are no others."""
    with Host("--workers", "1") as host:
        harness.paths.set_path(host, "routed")
        one, two = host.pair()
        note = rounds([(one, two)], program)
        status = host.status()
        need((status["worker_count"], status["moved_bytes"]) == (1, 0), str(status))
        need({vnic["worker"] for vnic in status["vnics"]} == {1}, str(status["vnics"]))
        return note


@pytest.fixture(scope="module", params=[(), ("--move-bytes-min", "1")], ids=["by themselves", "all that they can"])
def options(request):
    return request.param


@pytest.fixture(scope="module")
def host(options):
    with Host("--workers", WORKER_COUNT, *options) as host:
        need(paths.set_path(host, "routed"), "the router does not take the data path")
        yield host


@pytest.fixture(scope="module")
def containers(host):
    return [host.container(f"c{at}") for at in range(2 * PAIRS + 2)]


@pytest.fixture(scope="module")
def pairs(containers):
    return [(containers[2 * at], containers[2 * at + 1]) for at in range(PAIRS)]


def test_option_workers(options, host):
    if not options:
        refuses_options(host)
    command(host, "up", "--workers", WORKER_COUNT)


def test_who_is_where(host, containers):
    shown(host, containers)


def test_memory_comes_and_goes(host, pairs, held):
    rounds(pairs, harness.program("copy_threads"))


def test_processes_come_and_go(host, pairs, containers, held):
    rounds(pairs, harness.program("copy_threads"), lambda: killed_meanwhile(*containers[-2:], harness.program("kill")))


def test_workers_copied(host, held):
    moved(host, 0)


def test_nothing_is_left_in_the_router(host, held):
    harness.wait_for_resources(host, held)


def test_idle_host_costs_nothing(host, held):
    idle(host)


def test_one_worker():
    """It is the router's own: there are no others."""
    alone(harness.program("copy_threads"))
