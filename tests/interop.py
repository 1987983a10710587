#!/usr/bin/env python3
"""A real kernel's RDMA: runs the differential suite on Linux's Soft-RoCE in a guest, and then FreeFlow's side.

    tests/interop.py [--update] [--packages] [PATTERN…]

Fails if the kernel's trace is not the recorded one (differential/rxe.trace), scenario by scenario; --update records it
anew. A pattern of names chooses scenarios. --packages installs what scripts/rxe-guest needs. The guest is emulated and
slow beside other work, so a scenario that differs gets a second chance before it fails: it is the recorded trace that
is in question, not the kernel.
"""

import json
import sys

import differential
import lib
from lib import need

GUEST = lib.ROOT / "scripts" / "rxe-guest"
SECONDS = 1200


def on_rxe(*patterns):
    path = differential.build()
    output = lib.run([GUEST, "--seconds", SECONDS, "--", path, "--spare-the-kernel", *patterns], SECONDS + 20)
    return differential.scenarios(output)


def heading():
    kernel = json.loads(lib.run([GUEST, "--versions"]))
    library = lib.run(["dpkg-query", "--show", "--showformat=${Version}", "libibverbs1"])
    return (f"# The differential suite on Linux's Soft-RoCE (rxe), recorded by tests/interop.py --update.\n"
            f"# Kernel: Debian's {kernel['kernel']}, version {kernel['version']}, emulated by QEMU.\n"
            f"# Library: Debian's libibverbs1 with its rxe provider, {library}.\n"
            f"# Both ends on one device, rxe0 on a dummy interface with an MTU of 4200 (scripts/rxe-guest).\n")


def same(name, recorded, now):
    need(recorded is not None, "it is not in the recorded trace (--update)")
    need(now is not None, "it did not run")
    need(now == recorded, "\n".join(["not as recorded:", *differential.difference(recorded, now)]))


def record(now):
    """Writes the trace: what ran just now, and what was recorded of scenarios that did not run."""
    names = lib.run([differential.build(), "list"]).split()
    old = differential.scenarios(differential.TRACE.read_text()) if differential.TRACE.exists() else {}
    both = {**old, **now}
    text = "".join("\n".join([f"== {name}", *both[name], ""]) for name in names if name in both)
    differential.TRACE.write_text(heading() + text)


def test(checks):
    patterns = [word for word in sys.argv[1:] if not word.startswith("--")] or ["all"]
    if "--packages" in sys.argv:
        lib.run([GUEST, "--packages"], 300)
    now = on_rxe(*patterns)
    if "--update" in sys.argv:
        record(now)
    recorded = differential.scenarios(differential.TRACE.read_text())
    again = [name for name, lines in now.items() if recorded.get(name) not in (None, lines)]
    if again:
        now.update(on_rxe(*again))
    for name in {**recorded, **now} if patterns == ["all"] else now:
        checks.check(f"rxe: {name}", same, name, recorded.get(name), now.get(name))
    differential.compare(checks, patterns)


if __name__ == "__main__":
    lib.main(test)
