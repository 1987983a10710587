"""Every limit and refusal that `ibv_devinfo -v` prints is reached (tests/programs/limits.c), and the router is none the worse."""

import re

import harness
from harness import need

def each(output, name):
    line = next((line for line in output.splitlines() if name in line), "")
    need(line.startswith("ok"), line or output)
    return line


def test_every_limit_is_reached(check, container, held):
    output = container.exec(harness.program("limits"), seconds=300, codes=(0, 1))
    names = re.findall(r"^(?:ok|FAILED) +(.*?):", output, re.M)
    need(len(names) >= 25, f"too few limits:\n{output}")
    for name in names:
        check(name, each, output, f" {name}:")


def test_completion_events_that_nobody_reads(container, held):
    """More than a channel holds: tests/programs/comp_events.c."""
    container.exec(harness.program("comp_events"))


def test_nothing_is_left_in_the_router(host, held):
    harness.wait_for_resources(host, held)
