#!/usr/bin/env python3
"""The differential suite: FreeFlow's trace of each scenario against that of Linux's Soft-RoCE.

    tests/differential.py [--update] [--wire] [PATTERN…]

`differential/rxe.trace` is what a real kernel said (tests/interop.py records it); `differential/differences.txt` lists
each difference with its reason. A scenario passes if its difference is exactly the listed one, most often none: both a
difference that is not listed and a listed one that is gone fail. --update rewrites the list to what is; a scenario with
a new difference gets the reason `unreviewed`, with which the test fails until a person has written a better one.

--wire runs the scenarios that have a peer, with the peer on another host: one process, two devices, and packets between
them. What they say has to be the same, so `differential/differences-wire.txt` lists only what differs further.
"""

import difflib
import fcntl
import fnmatch
import os
import re
import subprocess
import sys

import lib
from lib import need

SOURCES = lib.ROOT / "tests" / "differential"
TRACE = SOURCES / "rxe.trace"
DIFFERENCES = SOURCES / "differences.txt"
WIRE_DIFFERENCES = SOURCES / "differences-wire.txt"
UNREVIEWED = "unreviewed"
SIDES = ("freeflow", "rxe", "both")
SECONDS = 200
# Those with a peer, but for what is one device's own: creation, resizing, a CQ of both ends, an answer to itself, memory
# that two ends atomically change.
TWO_SIDED = ("cq_a*", "cq_ex_errors", "cq_ex_rc", "cq_ex_ud", "cq_poll_*", "data_[!a]*", "data_al*", "data_atomic_*",
             "data_atomics", "error_*", "event_*", "fence_*", "flush_order_*", "key_r*", "key_u*", "mr_iova",
             "mr_rereg_*", "multicast_delivery", "order_*", "post_inline_*", "post_?c_inline", "post_ud_inline",
             "post_list_*", "read_depth_*", "reuse_*", "rnr_*", "send_inv_*", "sqd_*", "srq_[befil]*",
             "uc_*", "ud_b*", "ud_c*", "ud_h[e]*", "ud_l*", "ud_n*", "ud_re*", "ud_to_[ru]c", "ud_w*", "window_*",
             "wr_batch_*", "wr_inline")


def build():
    """The path of the program, built if need be."""
    out = lib.TARGET / "test-programs"
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".differential.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make = ["make", "-s", "-C", SOURCES, f"OUT={out}"]
        built = subprocess.run(make, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    need(built.returncode == 0, f"the differential program does not build:\n{built.stdout}")
    return str(out / "differential")


def scenarios(text):
    """A trace's lines by scenario, in its order; comments are left out."""
    found, lines = {}, []
    for line in text.splitlines():
        if line.startswith("== "):
            lines = found.setdefault(line[3:], [])
            need(not lines, f"the trace has {line[3:]} twice")
        elif not line.startswith("#"):
            lines.append(line)
    return found


def difference(rxe, freeflow):
    """The lines of a unified difference without context, without its heading."""
    return [line.rstrip("\n") for line in difflib.unified_diff(rxe, freeflow, n=0, lineterm="")][2:]


class Table:
    """What `differences.txt` says."""

    def __init__(self, file):
        self.file, text = file, file.read_text()
        self.heading, self.reasons, self.scenarios = [], {}, {}
        lines = self.heading
        for number, line in enumerate(text.splitlines(), 1):
            reason, scenario = re.fullmatch(r"reason (\S+)", line), re.fullmatch(r"scenario (\S+): (.+)", line)
            if reason:
                need(reason[1] not in self.reasons, f"{file.name}:{number}: the reason {reason[1]} twice")
                lines = self.reasons.setdefault(reason[1], [])
            elif scenario:
                need(scenario[1] not in self.scenarios, f"{file.name}:{number}: {scenario[1]} twice")
                lines = []
                self.scenarios[scenario[1]] = (scenario[2].split(), lines)
            elif lines is self.heading or line:
                lines.append(line)

    def check_reasons(self):
        """Each reason says which side is right and why, and is used."""
        used = {name for names, _ in self.scenarios.values() for name in names}
        for name, lines in self.reasons.items():
            side = re.fullmatch(r"    right: (\S+)", lines[0]) if lines else None
            need(side and side[1] in SIDES, f"the reason {name} does not say which side is right: {', '.join(SIDES)}")
            need(len(lines) > 1, f"the reason {name} names no clause of a standard or man page")
        unknown, idle = used - self.reasons.keys(), self.reasons.keys() - used
        need(not unknown, f"reasons without a text: {', '.join(sorted(unknown))}")
        need(not idle, f"reasons that no scenario gives: {', '.join(sorted(idle))}")

    def check(self, name, rxe, freeflow):
        need(rxe is not None, "the recorded trace of rxe does not have it: run tests/interop.py --update")
        need(freeflow is not None, "FreeFlow did not run it")
        names, listed = self.scenarios.get(name, ((), []))
        now = difference(rxe, freeflow)
        need(now == listed, "\n".join(["not the listed difference. Listed:", *listed, "Now:", *now]))
        need(UNREVIEWED not in names, "\n".join(["this difference was not reviewed:", *now]))
        return f"differs: {' '.join(names)}" if names else ""

    def text(self):
        parts = ["\n".join(self.heading).rstrip("\n")]
        parts += ["\n".join([f"reason {name}", *lines]) for name, lines in self.reasons.items()]
        parts += ["\n".join([f"scenario {name}: {' '.join(names)}", *lines])
                  for name, (names, lines) in self.scenarios.items()]
        return "\n\n".join(parts) + "\n"


def run_on_freeflow(patterns):
    path = build()
    with lib.Host() as host:
        return scenarios(host.container("one").exec(path, *patterns, seconds=SECONDS))


def run_over_wire(lab, patterns):
    """One process with a device of each host, so outside of containers; end B has the second."""
    path = build()
    sockets = []
    for host in lab.hosts[:2]:
        before = set((host.run_dir / "vnics").iterdir())
        host.container("differential")
        (vnic,) = set((host.run_dir / "vnics").iterdir()) - before
        sockets.append(vnic / "router.sock")
    env = {**os.environ, "FREEFLOW_SOCKET": str(sockets[0]), "DIFFERENTIAL_PEER": str(sockets[1]),
           "LD_LIBRARY_PATH": str(lib.DIST / "lib")}
    output = lib.run([path, *patterns], SECONDS, env=env)
    for host in lab.hosts[:2]:
        host.freeflow("rm", "-f", "differential")
    return scenarios(output)


def update(table, rxe, freeflow, base=None):
    """With a `base`, what that one lists is left out."""
    for name in rxe.keys() & freeflow.keys():
        now = difference(rxe[name], freeflow[name])
        names, listed = table.scenarios.pop(name, ([UNREVIEWED], []))
        if now != (base.scenarios.get(name, ((), []))[1] if base else []):
            table.scenarios[name] = (names if now == listed else sorted({*names, UNREVIEWED}), now)
    for name in table.scenarios.keys() - rxe.keys():
        del table.scenarios[name]
    table.scenarios = {name: table.scenarios[name] for name in rxe if name in table.scenarios}
    new = table.file.with_name(f".{table.file.name}.{os.getpid()}")
    new.write_text(table.text())
    new.rename(table.file)


def selected(names, patterns):
    return [name for name in names if "all" in patterns or any(fnmatch.fnmatch(name, word) for word in patterns)]


def compare(checks, patterns=("all",)):
    """Runs FreeFlow and counts a check for each scenario."""
    rxe, freeflow = scenarios(TRACE.read_text()), run_on_freeflow(patterns)
    table = Table(DIFFERENCES)
    for name in selected({**rxe, **freeflow, **table.scenarios}, patterns):
        checks.check(name, table.check, name, rxe.get(name), freeflow.get(name))
    checks.check("every reason says who is right and why", table.check_reasons)


def compare_over_wire(checks, lab, patterns=TWO_SIDED):
    """The same with the peers on another host."""
    rxe, freeflow = scenarios(TRACE.read_text()), run_over_wire(lab, patterns)
    base, table = Table(DIFFERENCES), Table(WIRE_DIFFERENCES)
    for name in selected({**rxe, **freeflow}, patterns):
        listed = table if name in table.scenarios else base
        checks.check(f"over the wire: {name}", listed.check, name, rxe.get(name), freeflow.get(name))
    checks.check("over the wire: every reason says who is right and why", table.check_reasons)


def test(checks):
    options = ("--update", "--wire")
    words = [word for word in sys.argv[1:] if word not in options]
    if "--wire" not in sys.argv:
        words = words or (["all"] if lib.SAMPLE == 1 else lib.sample(scenarios(TRACE.read_text())))
        if "--update" in sys.argv:
            update(Table(DIFFERENCES), scenarios(TRACE.read_text()), run_on_freeflow(words))
        compare(checks, words)
        return
    with lib.Lab(2, 4200) as lab:
        words = words or TWO_SIDED
        if "--update" in sys.argv:
            update(Table(WIRE_DIFFERENCES), scenarios(TRACE.read_text()), run_over_wire(lab, words), Table(DIFFERENCES))
        compare_over_wire(checks, lab, words)


if __name__ == "__main__":
    lib.main(test)
