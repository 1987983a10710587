"""Programs that poll, in containers, take no more than their share: who is not in a container still gets its turn."""

import time

import harness
from harness import PORT, Failure, need

KINDS = ([], ["-i"], ["-e"], ["-e", "-i"], ["-m", "shared"], [])
SECONDS = 12
# A turn comes within tens of milliseconds on a crowded machine; seconds mean that somebody starves.
LATE_SECONDS_MAX = 1.0


def bystander(server, client, load):
    running = []
    for number, options in enumerate(KINDS):
        port = PORT + number
        there = server.start(load, *options, "-t", SECONDS + 30, "server", port)
        server.wait_for_port(there, port)
        running += [there, client.start(load, *options, "-t", SECONDS + 30, "client", server.ip, port)]
    for program in running:
        program.wait_for_output("ready", 40)
    worst, end = 0, time.monotonic() + SECONDS
    while time.monotonic() < end:
        begin = time.monotonic()
        time.sleep(0.01)
        worst = max(worst, time.monotonic() - begin)
    for program in running[1::2]:
        program.terminate()
    for program in running:
        code = program.wait(60)
        need(code == 0, f"exit code {code}:\n{program.output()}")
    need(worst < LATE_SECONDS_MAX, f"a sleep of 10 ms outside the containers took {worst:.2f} s")
    return f"longest sleep of 10 ms: {worst * 1000:.0f} ms"


def best_of_three(server, client, load):
    """A machine that is not given its processors for a while is late too."""
    for last in (False, False, True):
        try:
            return bystander(server, client, load)
        except Failure:
            if last:
                raise


def test_pairs_that_poll_and_sleep_in_turns(server, client):
    best_of_three(server, client, harness.program("load"))
