"""A real kernel's RDMA: runs the differential suite on Linux's Soft-RoCE in a guest (`make test-interop`).

Fails if the kernel's trace is not the recorded one, scenario by scenario; `--update` records it again. The guest is
emulated and slow beside other work, so a scenario that differs gets a second chance before it fails: it is the recorded
trace that is in question, not the kernel.
"""

import json

import pytest

import harness
from harness import differential, need
from harness.cases import selected
from harness.settings import ROOT

GUEST = ROOT / "scripts" / "rxe-guest"
SECONDS = 1200


def on_rxe(*patterns):
    path = differential.build()
    output = harness.run([GUEST, "--seconds", SECONDS, "--", path, "--spare-the-kernel", *patterns], SECONDS + 20)
    return differential.scenarios(output)


def heading():
    kernel = json.loads(harness.run([GUEST, "--versions"]))
    library = harness.run(["dpkg-query", "--show", "--showformat=${Version}", "libibverbs1"])
    return (f"# The differential suite on Linux's Soft-RoCE (rxe), recorded by tests/interop/test_recording.py --update.\n"
            f"# Kernel: Debian's {kernel['kernel']}, version {kernel['version']}, emulated by QEMU.\n"
            f"# Library: Debian's libibverbs1 with its rxe provider, {library}.\n"
            f"# Both ends on one device, rxe0 on a dummy interface with an MTU of 4200 (scripts/rxe-guest).\n")


def same(name, recorded, now):
    need(recorded is not None, "it is not in the recorded trace (--update)")
    need(now is not None, "it did not run")
    need(now == recorded, "\n".join(["not as recorded:", *differential.difference(recorded, now)]))


def record(now):
    """Writes the trace: what ran just now, and what was recorded of scenarios that did not run."""
    names = harness.run([differential.build(), "list"]).split()
    old = differential.scenarios(differential.TRACE.read_text()) if differential.TRACE.exists() else {}
    both = {**old, **now}
    text = "".join("\n".join([f"== {name}", *both[name], ""]) for name in names if name in both)
    differential.TRACE.write_text(heading() + text)


@pytest.fixture(scope="module")
def recorded(now):
    return differential.scenarios(differential.TRACE.read_text())


@pytest.fixture(scope="module")
def now(request):
    """The kernel's answers for the chosen scenarios; with --update they are recorded."""
    harness.run([GUEST, "--packages"], 300)
    cases = selected(request, test_kernel_says_what_was_recorded)
    said = on_rxe(*cases)
    if request.config.option.update:
        record(said)
    recorded = differential.scenarios(differential.TRACE.read_text())
    again = [name for name, lines in said.items() if recorded.get(name) not in (None, lines)]
    if again:
        said.update(on_rxe(*again))
    return said


@pytest.mark.timeout(2 * SECONDS + 400)
@pytest.mark.parametrize("case", differential.names())
def test_kernel_says_what_was_recorded(now, recorded, case):
    same(case, recorded.get(case), now.get(case))
