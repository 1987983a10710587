#!/usr/bin/env python3
"""kill -9 of either end at random points under load: the other end learns of it, and the router keeps nothing."""

import time

import lib
from lib import need

KILLS = 1000 if lib.FULL else 200
MEMORY_GROWTH_KIB_MAX = 4096


def kills(server, client, kill, seed, count):
    server_output, output = lib.in_two_containers(
        server, client, [kill, "server", lib.PORT, seed, count], [kill, "client", "{ip}", lib.PORT, seed, count],
        seconds=30 + count)
    need("; 0 wrong" in output and "; 0 wrong" in server_output, output + server_output)
    return "\n            ".join((server_output + output).strip().splitlines()[-2:])


def memory_returns(host, before_kib):
    """What the first kills took (buffers, tables) is taken once; then it must not grow with their number."""
    for _ in range(20):
        now_kib = lib.router_memory_kib(host)
        if now_kib - before_kib <= MEMORY_GROWTH_KIB_MAX:
            return f"{before_kib} KiB before, {now_kib} after"
        time.sleep(0.1)
    raise lib.Failure(f"the router held {before_kib} KiB before and {now_kib} KiB after")


def test(checks):
    kill = lib.program("kill")
    with lib.Host() as host:
        server, client = host.pair()
        before = lib.router_resources(host)
        checks.check("20 kills to warm up", kills, server, client, kill, lib.SEED + 1, 20)
        checks.check("nothing is left after them", lib.wait_for_resources, host, before)
        memory_kib = lib.router_memory_kib(host)
        checks.check(f"{KILLS} kills, seed {lib.SEED}", kills, server, client, kill, lib.SEED, KILLS)
        checks.check("descriptors, mappings and objects are as before", lib.wait_for_resources, host, before)
        checks.check("memory is as before", memory_returns, host, memory_kib)


if __name__ == "__main__":
    lib.main(test)
