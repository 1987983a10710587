"""kill -9 of either end at random points under load: the other end learns of it, and the router keeps nothing."""

import time

import harness
from harness import PORT, Failure, need
from harness.settings import FULL, SEED

KILLS = 1000 if FULL else 200
MEMORY_GROWTH_KIB_MAX = 4096


def kills(server, client, kill, seed, count):
    server_output, output = harness.in_two_containers(
        server, client, [kill, "server", PORT, seed, count], [kill, "client", "{ip}", PORT, seed, count],
        seconds=30 + count)
    need("; 0 wrong" in output and "; 0 wrong" in server_output, output + server_output)
    return "\n            ".join((server_output + output).strip().splitlines()[-2:])


def memory_returns(host, before_kib):
    """Memory that the first kills took (buffers, tables) is taken once; then it must not grow with their number."""
    for _ in range(20):
        now_kib = harness.router_memory_kib(host)
        if now_kib - before_kib <= MEMORY_GROWTH_KIB_MAX:
            return f"{before_kib} KiB before, {now_kib} after"
        time.sleep(0.1)
    raise Failure(f"the router held {before_kib} KiB before and {now_kib} KiB after")


def test_killed_ends(check, host, pair, held):
    kill = harness.program("kill")
    check("20 kills to warm up", kills, *pair, kill, SEED + 1, 20)
    check("nothing is left after them", harness.wait_for_resources, host, held)
    memory_kib = harness.router_memory_kib(host)
    check(f"{KILLS} kills, seed {SEED}", kills, *pair, kill, SEED, KILLS)
    check("descriptors, mappings and objects are as before", harness.wait_for_resources, host, held)
    check("memory is as before", memory_returns, host, memory_kib)
