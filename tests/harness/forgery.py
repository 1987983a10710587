"""Forged RoCEv2 packets between hosts of a lab, and what a router counts of them."""

import pathlib
import sys
import time

from harness.failure import need

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
