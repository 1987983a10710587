"""Forged RoCEv2 packets between hosts of a lab, and what a router counts of them."""

import pathlib
import sys
import time

from harness.failure import need
from harness.programs import program
from harness.settings import PORT

FORGE = [sys.executable, str(pathlib.Path(__file__).with_name("forge.py"))]
SPY = [sys.executable, str(pathlib.Path(__file__).with_name("spy.py"))]
COUNT = 20
STRANGER = "192.168.240.99"
COUNTED_SECONDS = 10


def refusals(host):
    status = host.wire()
    counts = dict(status["counters"])
    for name, count in status["drops"].items():
        counts[name] = counts.get(name, 0) + count
    return counts


def counted(host, names, before, least):
    """Until the router has counted as many as were sent."""
    end = time.monotonic() + COUNTED_SECONDS
    while True:
        now = refusals(host)
        count = sum(now.get(name, 0) - before.get(name, 0) for name in names)
        if count >= least:
            return f"{count} counted"
        more = {name: now[name] - before.get(name, 0) for name in now if now[name] != before.get(name, 0)}
        need(time.monotonic() < end, f"{count} of {least} counted as {' or '.join(names)}: {more}")
        time.sleep(0.02)


def address_of(host):
    return f"192.168.240.{host.number}"


class Victim:
    """A pair at work between two hosts: it compares what it reads, and fails with the first error.

    `offset`: of the address to aim at, from the begin of the server's memory.
    """

    def __init__(self, server, client, offset=0):
        load = program("load")
        self.there = server.start(load, "server", PORT)
        server.wait_for_port(self.there)
        self.here = client.start(load, "-e", "client", server.ip, PORT)
        self.qpn, self.rkey, address = (int(word) for word in self.there.wait_for_output("ready").split()[1:4])
        self.address = address + offset

    def stop(self):
        self.here.terminate()
        for side in (self.here, self.there):
            code = side.wait(30)
            need(code == 0 and "all right" in side.output(), f"it was disturbed ({code}):\n{side.output()}")
        return self.here.output().strip().splitlines()[-1]

    def need_alive(self):
        for side in (self.here, self.there):
            need(side.process.poll() is None, f"it was disturbed:\n{side.output()}")
