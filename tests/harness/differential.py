"""The differential suite: FreeFlow's trace of a scenario, that of Linux's Soft-RoCE, and the list of differences.

`rxe.trace` is what a real kernel said (tests/interop/test_recording.py records it); `differences.txt` lists each
difference with its reason, `differences-wire.txt` what differs further where the peer is on another host.
"""

import difflib
import fnmatch
import os
import re

from harness import settings
from harness.failure import need
from harness.processes import run
from harness.programs import make

SOURCES = settings.TESTS / "verbs" / "differential"
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
    return str(make(SOURCES, "differential", ".differential.lock") / "differential")


def names():
    """Of all scenarios: what the program has, what was recorded, what is listed."""
    recorded, listed = scenarios(TRACE.read_text()), Table(DIFFERENCES).scenarios
    return list(dict.fromkeys([*run([build(), "list"]).split(), *recorded, *listed]))


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
    """The entries of `differences.txt`."""

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
        need(rxe is not None, "the recorded trace of rxe lacks it: tests/interop/test_recording.py --update")
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


def run_on_freeflow(container, patterns):
    return scenarios(container.exec(build(), *patterns, seconds=SECONDS))


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
           "LD_LIBRARY_PATH": str(settings.DIST / "lib")}
    output = run([path, *patterns], SECONDS, env=env)
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


def two_sided():
    """The names of those that have a peer."""
    return [name for name in names() if any(fnmatch.fnmatch(name, pattern) for pattern in TWO_SIDED)]
