"""Packets lost, late, twice, out of order and spoilt; hosts cut off; routers killed; keys that do not fit.

The programs check every byte (tests/programs/wire.c). What a host's death looks like to a program is an error in the time that
the queue pair's attributes promise; what it must never look like is silence.
"""

import contextlib
import json
import time

import pytest

import harness
from harness import PORT, Lab, cm, need
from harness.roce import PORT as ROCE_PORT

MTU = 4200
FAULT_MS = 500
MARKS_MS = 4000
FAULTS = {
    "loss 0.1 %": ["--loss", "0.1%"],
    "loss 5 %": ["--loss", "5%"],
    "duplicates 5 %": ["--duplicate", "5%"],
    "reordering 5 %": ["--reorder", "5%"],
    "spoilt bits 3 %": ["--corrupt", "3%"],
    "delay": ["--delay", "300us", "--delayed", "20%"],
    "everything": ["--loss", "1%", "--duplicate", "1%", "--reorder", "2%", "--corrupt", "1%", "--delay", "200us",
                   "--delayed", "5%"],
}
# Local ACK timeout and retry count of queue pairs that meet a dead host: the last one lives longer than the routers'
# own patience with each other. The first timeout of those with retries is longer than a router is without a processor.
PROMISES = [(14, 0), (17, 3), (17, 7)]
PATIENT_TIMEOUT, PATIENT_RETRIES = 17, 7
SHORT_CUT_SECONDS = 0.7
# Of a machine whose cores other tests use too.
SLACK_SECONDS = 6
STATE_SECONDS = 40
RETRY_EXCEEDED = "error transport retry counter exceeded"


def timeout_seconds(code):
    """IBTA 9.7.6.1.3; an implementation may take up to four times as long."""
    return 4.096e-6 * 2 ** code


class Pair:
    """Two programs, each on its own host, that are connected and busy (or, with `go`, about to be)."""

    def __init__(self, server, client, port, *options):
        wire = harness.program("wire")
        self.server, self.client = server, client
        self.there = server.start(wire, *options, "server", port)
        self.here = client.start(wire, *options, "client", server.ip, port)
        self.both = (self.there, self.here)
        for running in self.both:
            running.wait_for_output("ready")

    def error_ns(self, running, seconds, wanted=RETRY_EXCEEDED):
        """When it saw its first error."""
        code = running.wait(seconds)
        output = running.output()
        need(code == 0 and wanted in output, f"exit code {code}, not '{wanted}':\n{output}")
        return int(next(line for line in output.splitlines() if line.startswith("error ")).split()[-1])

    def learns(self, running, seconds, wanted=RETRY_EXCEEDED):
        self.error_ns(running, seconds, wanted)

    def need_right(self, seconds=40):
        for running in self.both:
            code = running.wait(seconds)
            need(code == 0 and "all right" in running.output(), f"exit code {code}:\n{running.output()}")

    def forget(self):
        for running, container in ((self.there, self.server), (self.here, self.client)):
            running.kill()
            with contextlib.suppress(ValueError):
                container.background.remove(running)


def good(server, client, *options):
    """A connection made now works."""
    pair = Pair(server, client, PORT, "-t", FAULT_MS, *options)
    try:
        pair.need_right()
    finally:
        pair.forget()


def set_faults(lab, *words):
    for host in lab.hosts:
        host.freeflow("wire", "faults", *words)


def injected(lab):
    return sum(count for host in lab.hosts for name, count in host.wire()["counters"].items()
               if name.startswith("injected_"))


def with_faults(lab, server, client, words, *options):
    before = injected(lab)
    set_faults(lab, *words)
    try:
        good(server, client, *options)
    finally:
        set_faults(lab, "off")
    count = injected(lab) - before
    need(count > 0, "no fault was injected")
    return f"{count} faults"


# ---- marks of congestion

# A switch that finds a queue: every packet that may be marked (ECT(0)) is.
MARKS = ["-p", "udp", "--dport", ROCE_PORT, "-m", "tos", "--tos", "0x02/0x03", "-j", "TOS", "--set-tos", "0x03/0x03"]


@contextlib.contextmanager
def marking(host):
    harness.require_commands("iptables")
    rule = ["iptables", "-w", "-t", "mangle"]
    harness.run(host.enter(*rule, "-A", "POSTROUTING", *MARKS))
    try:
        yield
    finally:
        harness.run(host.enter(*rule, "-D", "POSTROUTING", *MARKS))


def sees_marks(host):
    """Whether a queue pair has seen marks: on requests, or echoed to it."""
    return any(qp["counters"].get("rcvd_ecn_marked", 0) for qp in host.wire()["qps"])


# ---- hosts cut off


def wait_for_peer(host, name, up, seconds=STATE_SECONDS):
    """Until a router says that another host is there, or is not; gives how long that took."""
    begin = time.monotonic()
    while True:
        peers = json.loads(host.freeflow("peers", "ls", "-o", "json"))["peers"]
        state = next(peer["state"] for peer in peers if peer["host"] == name)
        if (state == "up") == up:
            return f"{time.monotonic() - begin:.1f} s"
        need(time.monotonic() - begin < seconds, f"{name} is {state} after {seconds} s")
        time.sleep(0.05)


def short_cut(lab, server, client):
    """Shorter than the patience of a queue pair: nothing but time is lost."""
    pair = Pair(server, client, PORT, "-t", 2500, "-T", PATIENT_TIMEOUT, "-R", PATIENT_RETRIES)
    try:
        lab.cut(2)
        time.sleep(SHORT_CUT_SECONDS)
        lab.heal(2)
        pair.need_right()
    finally:
        pair.forget()
    for host in lab.hosts:
        host_peers_up(host)


def host_peers_up(host):
    wait_for_peer(host, f"host{3 - host.number}", True)


def cut_off(check, lab, server, client):
    """Every program on either side learns of it in its own time."""
    pairs = [Pair(server, client, PORT + number, "-x", "-q", 2, "-t", 120000, "-T", timeout, "-R", retries)
             for number, (timeout, retries) in enumerate(PROMISES)]
    never = Pair(server, client, PORT + len(PROMISES), "-x", "-t", 120000, "-T", 0)
    before_ns = time.monotonic_ns()
    lab.cut(2)
    after_ns = time.monotonic_ns()

    def in_time(pair, timeout, retries):
        # Between the last answer and the cut some of the first timeout may have passed: `retries` whole ones are left.
        least, most = retries * timeout_seconds(timeout), 4 * (retries + 1) * timeout_seconds(timeout) + SLACK_SECONDS
        took = []
        for running in pair.both:
            error_ns = pair.error_ns(running, most + SLACK_SECONDS)
            # Without retries an answer that a busy machine brings late is the end, also before the cut.
            need(not retries or error_ns - before_ns >= least * 1e9, f"after {(error_ns - before_ns) / 1e9:.3f} s, too early by "
                 f"{least} s of retries")
            need(error_ns - after_ns <= most * 1e9, f"after {(error_ns - after_ns) / 1e9:.3f} s, promised: {most:.3f}")
            took.append(f"{(error_ns - before_ns) / 1e9:.2f} s")
        return f"{', '.join(took)} of at least {least:.2f}"

    for pair, (timeout, retries) in zip(pairs, PROMISES):
        check(f"cut off: an error with timeout {timeout} and {retries} retries", in_time, pair, timeout, retries)
        pair.forget()
    for host in lab.hosts:
        check(f"cut off: router {host.number} says so", wait_for_peer, host, f"host{3 - host.number}", False)
    check("cut off: timeout 0 waits for ever", still_waiting, never)
    lab.heal(2)
    for host in lab.hosts:
        check(f"healed: router {host.number} says so", host_peers_up, host)
    check("healed: new connections work", good, server, client)
    never.forget()


def still_waiting(pair):
    for running in pair.both:
        need(running.process.poll() is None, f"it ended:\n{running.output()}")


# ---- a router killed


def killed(check, lab, server, client):
    """The second host's router dies without a word and comes back as another one."""
    host = lab.host(2)
    go = lab.directory / "go"
    busy = Pair(server, client, PORT, "-x", "-t", 120000, "-T", 15, "-R", 3)
    idle = Pair(server, client, PORT + 1, "-x", "-t", 120000, "-T", 15, "-R", 3, "-g", go)
    harness.end_router(host)
    check("router killed: its own program learns of it", busy.learns, busy.here, 20, "error ")
    check("router killed: the program on the other host gets an error", busy.learns, busy.there, 30)
    check("router killed: the other router says so", wait_for_peer, lab.host(1), "host2", False)
    host.up()
    host.pids.add(host.router_pid())
    for each in lab.hosts:
        check(f"router back: router {each.number} says so", host_peers_up, each)
    go.touch()
    check("router back: an old queue pair's work on the other host fails", idle.learns, idle.there, 30)
    check("router back: an old queue pair's work on its own host fails", idle.learns, idle.here, 30, "error ")
    busy.forget()
    idle.forget()
    check("router back: new connections work", good, server, client)
    check("router back: and the other way round", good, client, server)


# ---- keys


class WrongKey:
    """The second host believes another key to be the first one's."""

    def __init__(self, host):
        self.host, self.file = host, host.run_dir / "peers.json"

    def __enter__(self):
        self.before = self.file.read_text()
        peers = json.loads(self.before)
        mine = harness.run([self.host.freeflow_path, "peers", "key", self.host.run_dir / "wrong.key"]).split()[-1]
        for peer in peers["peers"]:
            peer["public_key"] = mine
        self.write(json.dumps(peers))

    def __exit__(self, *_):
        self.write(self.before)

    def write(self, text):
        self.file.write_text(text)
        self.host.freeflow("peers", "reload")


def refused_handshakes(host):
    return json.loads(host.freeflow("peers", "ls", "-o", "json"))["refused_handshakes"]


def stay_apart(lab, server, client):
    host = lab.host(2)
    before = refused_handshakes(host)
    with WrongKey(host):
        for each in lab.hosts:
            wait_for_peer(each, f"host{3 - each.number}", False)
        end = time.monotonic() + STATE_SECONDS
        while refused_handshakes(host) == before:
            need(time.monotonic() < end, "no handshake was refused")
            time.sleep(0.05)
        pair = Pair(server, client, PORT, "-x", "-t", 120000, "-T", 14, "-R", 2)
        try:
            for running in pair.both:
                pair.error_ns(running, 20)
        finally:
            pair.forget()
    for each in lab.hosts:
        host_peers_up(each)
    good(server, client)


# ---- the end


def goes_down(lab, server, client):
    """With work under way that nobody will ever answer."""
    pair = Pair(server, client, PORT, "-x", "-t", 120000, "-T", 0)
    lab.cut(2)
    try:
        lab.host(2).freeflow("down", "--force", seconds=30)
    finally:
        pair.forget()


@pytest.fixture(scope="module")
def lab():
    with Lab(2, MTU) as lab:
        yield lab


@pytest.fixture(scope="module")
def pair(lab):
    return lab.pair()


@pytest.mark.parametrize("faults", FAULTS)
def test_random_requests_with(lab, server, client, faults):
    with_faults(lab, server, client, FAULTS[faults])


def test_random_requests_with_everything_at_path_mtu_256(lab, server, client):
    with_faults(lab, server, client, FAULTS["everything"], "-m", 256, "-q", 2)


def test_marks_of_congestion_are_echoed(lab, server, client):
    """Packets that one host sends are marked. The other one sees the marks, and the sender hears of them."""
    pair = Pair(server, client, PORT, "-t", MARKS_MS)
    try:
        with marking(lab.host(1)):
            for host in lab.hosts:
                cm.wait_until(lambda host=host: sees_marks(host), f"host {host.number} sees no marks")
        pair.need_right()
    finally:
        pair.forget()


def test_short_cut(lab, server, client):
    short_cut(lab, server, client)


def test_host_is_cut_off_and_healed(check, lab, server, client):
    cut_off(check, lab, server, client)


def test_router_is_killed_and_comes_back(check, lab, server, client):
    killed(check, lab, server, client)


def test_wrong_key_is_refused(lab, server, client):
    stay_apart(lab, server, client)


def test_host_goes_down_over_work_that_waits_for_ever(lab, server, client):
    goes_down(lab, server, client)
