#!/usr/bin/env python3
"""Completion statuses, events and limits by the C interface: in one process, and between two containers."""

import lib
from lib import need


def loopback(container, statuses, names):
    output = container.exec(statuses, "loopback", *names, seconds=240)
    need("0 failed" in output, output)
    return output.strip().splitlines()[-1]


def two_containers(server, client, statuses, names=()):
    server_output, output = lib.in_two_containers(
        server, client, [statuses, "server", lib.PORT, *names], [statuses, "client", "{ip}", lib.PORT, *names],
        seconds=240)
    need("0 failed" in output and "0 failed" in server_output, output + server_output)
    return output.strip().splitlines()[-1]


def test(checks):
    statuses = lib.program("statuses")
    names = lib.sample(lib.run([statuses, "list"]).split())
    with lib.Host() as host:
        server, client = host.pair()
        before = lib.router_resources(host)
        checks.check("statuses in one process", loopback, server, statuses, names)
        checks.check("statuses between two containers", two_containers, server, client, statuses, names)
        checks.check("nothing is left in the router", lib.wait_for_resources, host, before)


if __name__ == "__main__":
    lib.main(test)
