#!/usr/bin/env python3
"""Every limit and refusal that `ibv_devinfo -v` prints is reached (tests/c/limits.c), and the router is none the worse."""

import re

import lib
from lib import need


def each(output, name):
    line = next((line for line in output.splitlines() if name in line), "")
    need(line.startswith("ok"), line or output)
    return line


def unread_events(container):
    """More than a channel holds: tests/c/comp_events.c."""
    return container.exec(lib.program("comp_events")).strip()


def test(checks):
    program = lib.program("limits")
    with lib.Host() as host:
        container = host.container("limits")
        before = lib.router_resources(host)
        output = container.exec(program, seconds=300, codes=(0, 1))
        names = re.findall(r"^(?:ok|FAILED) +(.*?):", output, re.M)
        need(len(names) >= 25, f"too few limits:\n{output}")
        for name in names:
            checks.check(name, each, output, f" {name}:")
        checks.check("completion events that nobody reads", unread_events, container)
        checks.check("nothing is left in the router", lib.wait_for_resources, host, before)


if __name__ == "__main__":
    lib.main(test)
