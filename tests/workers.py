#!/usr/bin/env python3
"""Several workers: which vNIC is where, what they copy, and that they touch nothing that was taken back.

The rounds of tests/c/movers.c, several pairs at once, beside processes that are killed and memory that is re-mapped; everything by the
router. FREEFLOW_TEST_WORKERS runs any other suite with several workers that copy all they can.
"""

import json

import lib
from lib import need

SECONDS = 30 if lib.FULL else 4
PAIRS = 2
WORKERS = 3


def command(host, *words, code=0):
    return host.freeflow(*words, codes=(code,))


def options(host):
    for bad in ("0", "33", "-1", "many", ""):
        output = command(host, "up", f"--workers={bad}", code=2)
        need("1 to 32, or auto" in output, f"--workers={bad}: {output}")
    output = command(host, "up", "--workers", 2, code=1)
    need(f"up with {WORKERS} workers" in output, output)
    command(host, "up", "--workers", WORKERS)
    command(host, "up")


def shown(host, containers):
    status = host.status()
    need(status["worker_count"] == WORKERS, str(status))
    where = {vnic["name"]: vnic["worker"] for vnic in status["vnics"]}
    need(sorted(where.values()) == sorted(1 + at % WORKERS for at in range(len(containers))), str(where))
    text = host.freeflow("status")
    need(f", {WORKERS} workers" in text and "WORKER" in text, text)
    threads = lib.pathlib.Path(f"/proc/{host.router_pid()}/task")
    names = [(thread / "comm").read_text().strip() for thread in threads.iterdir()]
    need(sum(name.startswith("ff-mover") for name in names) == WORKERS, str(names))
    return json.dumps(where)


def rounds(pairs, program, beside=None):
    """All pairs at once."""
    servers, clients = [], []
    for at, (server, client) in enumerate(pairs):
        seed = lib.SEED + at
        servers.append(server.start(program, seed, SECONDS, "server", lib.PORT))
        server.wait_for_port(servers[-1])
        clients.append(client.start(program, seed, SECONDS, "client", server.ip, lib.PORT))
    note = beside() if beside else ""
    for running in clients + servers:
        code = running.wait(SECONDS + 60)
        need(code == 0, f"{code}: {running.output()}")
    return "; ".join(client.output().strip() for client in clients) + note


def killed_meanwhile(server, client, kill):
    count = 40 * SECONDS
    _, output = lib.in_two_containers(
        server, client, [kill, "server", lib.PORT, lib.SEED, count], [kill, "client", "{ip}", lib.PORT, lib.SEED, count],
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
        fields = lib.pathlib.Path(f"/proc/{host.router_pid()}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])
    for last in (False, False, True):
        lib.time.sleep(1)
        before = ticks()
        lib.time.sleep(2)
        used = ticks() - before
        if used <= 2:
            break
        need(not last, f"{used} ticks in two seconds")


def alone(program):
    """One worker is the router's own: there are no others."""
    with lib.Host("--workers", "1") as host:
        lib.lib_paths.set_path(host, "routed")
        one, two = host.pair()
        note = rounds([(one, two)], program)
        status = host.status()
        need((status["worker_count"], status["moved_bytes"]) == (1, 0), str(status))
        need({vnic["worker"] for vnic in status["vnics"]} == {1}, str(status["vnics"]))
        return note


def test(checks):
    program, kill = lib.program("movers"), lib.program("kill")
    for options_of_copies in ((), ("--move-bytes-min", "1")):
        word = "all that they can" if options_of_copies else "by themselves"
        with lib.Host("--workers", WORKERS, *options_of_copies) as host:
            need(lib.lib_paths.set_path(host, "routed"), "the router does not take the data path")
            if not options_of_copies:
                checks.check("options", options, host)
            containers = [host.container(f"c{at}") for at in range(2 * PAIRS + 2)]
            pairs = [(containers[2 * at], containers[2 * at + 1]) for at in range(PAIRS)]
            checks.check("who is where", shown, host, containers)
            before = lib.router_resources(host)
            checks.check(f"memory comes and goes, seed {lib.SEED}, {word}", rounds, pairs, program)
            checks.check(f"processes too, {word}", rounds, pairs, program,
                         lambda: killed_meanwhile(*containers[-2:], kill))
            checks.check(f"the workers copied, {word}", moved, host, 0)
            checks.check("nothing is left in the router", lib.wait_for_resources, host, before)
            checks.check("an idle host costs nothing", idle, host)
    checks.check("one worker", alone, program)


if __name__ == "__main__":
    lib.main(test)
