#!/usr/bin/env python3
"""Completion statuses, events and limits by the C interface: in one process, and between two containers."""

import lib
from lib import need


def loopback(container, statuses):
    output = container.exec(statuses, "loopback", seconds=240)
    need("0 failed" in output, output)
    return output.strip().splitlines()[-1]


def two_containers(server, client, statuses):
    server_output, output = lib.in_two_containers(
        server, client, [statuses, "server", lib.PORT], [statuses, "client", "{ip}", lib.PORT], seconds=240)
    need("0 failed" in output and "0 failed" in server_output, output + server_output)
    return output.strip().splitlines()[-1]


def test(checks):
    statuses = lib.program("statuses")
    with lib.Host() as host:
        server, client = host.pair()
        before = lib.router_resources(host)
        checks.check("statuses in one process", loopback, server, statuses)
        checks.check("statuses between two containers", two_containers, server, client, statuses)
        checks.check("nothing is left in the router", lib.wait_for_resources, host, before)


if __name__ == "__main__":
    lib.main(test)
