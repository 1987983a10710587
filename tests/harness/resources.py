"""The router's holdings: counts, descriptors, mappings, memory, which may not grow."""

import contextlib
import pathlib
import time

from harness.failure import Failure, need
from harness.processes import children


def near_halves_of(host):
    """Processes that reach the vNICs' processes for the router: one with `--attachment remote`, none without."""
    found = []
    for pid in children(host.router_pid()):
        with contextlib.suppress(OSError):
            if b"--near-halves" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def router_resources(host):
    """Holdings that may not grow: counts by the router's own word, descriptors and mappings by the kernel's."""
    status = host.status()
    counts = {key: status[key] for key in ("session_count", "pd_count", "qp_count", "cq_count", "srq_count", "mr_count",
                                           "mw_count", "xrcd_count", "registered_bytes", "segment_count",
                                           "segment_bytes")}
    proc = pathlib.Path(f"/proc/{host.router_pid()}")
    holders = [proc, *(pathlib.Path(f"/proc/{pid}") for pid in near_halves_of(host))]
    counts["descriptors"] = sum(len(list((holder / "fd").iterdir())) for holder in holders)
    counts["mappings"] = sum("memfd" in line for line in (proc / "maps").read_text().splitlines())
    return counts


def router_memory_kib(host):
    for line in pathlib.Path(f"/proc/{host.router_pid()}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise Failure("the router has no VmRSS")


def wait_for_resources(host, wanted, seconds=10):
    """Until the router holds what it held before; Failure names what it does not let go."""
    end = time.monotonic() + seconds
    while True:
        now = router_resources(host)
        # A count read right after a command may still have its connection: fewer is as good.
        fewer = all(now[key] <= wanted[key] for key in ("descriptors", "mappings"))
        if fewer and all(now[key] == wanted[key] for key in wanted if key not in ("descriptors", "mappings")):
            return
        left = {key: f"{wanted[key]} then, {now[key]} now" for key in wanted if wanted[key] != now[key]}
        need(time.monotonic() < end, f"the router does not return to what it held: {left}")
        time.sleep(0.05)
