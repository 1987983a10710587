"""`freeflow lab`: hosts out of network namespaces, the IP path between their containers, and that nothing is left.

RDMA between the hosts is not looked at here, only what lies below and beside it.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import pytest

import harness
from harness import Lab, Running, need
from harness.settings import PROGRAMS, DIST

INSIDE = [sys.executable, str(PROGRAMS / "lab_inside.py")]
ROCE_PORT = 4791
OTHER_PORT = 5000
DONE_PORT = 5001
OVERLAY_BYTES = 50
ICMP_OVERHEAD_BYTES = 20


# ---- what a lab leaves


def links():
    return {link["ifname"] for link in json.loads(harness.run(["ip", "-j", "link"]))}


def namespaces():
    """Network namespaces that processes or mounts hold, but for this one's; others may come and go beside us."""
    found = set()
    for process in pathlib.Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.stat(process).st_ino)
        except OSError:
            continue
    for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[3].startswith("net:["):
            found.add(int(fields[3][5:-1]))
    return found


def own_namespaces(path):
    return {os.stat(file).st_ino for file in path.glob("*/netns")}


def need_nothing_left(run_dir, before, own=frozenset()):
    word = str(run_dir)
    mounts = [line for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines() if word in line]
    need(not mounts, f"mounts are left: {mounts}")
    for process in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            left = word.encode() in process.read_bytes() and process.parent.name != str(os.getpid())
        except OSError:
            continue
        need(not left, f"process {process.parent.name} is left")
    files = sorted(str(path) for path in run_dir.rglob("*"))
    need(not files, f"files are left: {files}")
    registered = [entry for entry in pathlib.Path("/run/freeflow-hosts").glob("*") if word in entry.read_text()]
    need(not registered, f"still on the list of run directories: {registered}")
    need(not own & namespaces(), "network namespaces are left")
    left = {name for name in links() - before if name.startswith(("ff", "port", "fabric"))}
    need(not left, f"interfaces are left: {left}")


# ---- the lab as it is made


def made_as_asked(lab):
    status = lab.status()
    need(len(status["hosts"]) == 3 and status["mtu"] == 1500, f"not what was asked for: {status}")
    for number, host in enumerate(status["hosts"], 1):
        wanted = {"host": number, "name": f"host{number}", "address": f"192.168.240.{number}",
                  "range": f"10.111.{number}.0/24", "link": "up", "dropped": 0, "containers": 0}
        got = {key: host[key] for key in wanted}
        need(got == wanted, f"{got} instead of {wanted}")
        need(host["router_pid"] and harness.router_of(host["router_pid"], host["run_dir"]), "no router")
        peers = json.loads((pathlib.Path(host["run_dir"]) / "peers.json").read_text())
        others = {peer["host"]: peer for peer in peers["peers"]}
        need(len(others) == 2 and f"host{number}" not in others, f"peers of {number}: {sorted(others)}")
        need(all(len(peer["public_key"]) == 64 for peer in others.values()), "no keys")
        key = pathlib.Path(host["run_dir"]) / peers["key_file"]
        need(key.stat().st_mode & 0o777 == 0o600, "the private key is open to others")
    need(os.stat("/proc/self/ns/net").st_ino not in own_namespaces(lab.path), "a host is in the machine's own network")


def ps_has_hosts(lab, containers):
    rows = json.loads(lab.freeflow("lab", "ps", "-o", "json"))
    seen = {row["name"]: (row["host"], row["ip"], row["status"]) for row in rows}
    wanted = {container.name: (f"host{number}", container.ip, "running")
              for number, container in enumerate(containers, 1)}
    need(seen == wanted, f"{seen} instead of {wanted}")
    for number, container in enumerate(containers, 1):
        need(container.ip.startswith(f"10.111.{number}."), f"{container.ip} is not of host {number}'s range")
    need("HOST" in lab.freeflow("lab", "ps").splitlines()[0], "no column of hosts")
    lab.freeflow("lab", "run", "--host", 2, "--name", "outside", "--ip", "10.111.3.9", "--", "true", codes=(125,))


def life_of_a_container(lab):
    lab.freeflow("lab", "run", "--host", 3, "--name", "brief", "--", "sh", "-c", "exit 7", codes=(7,))
    lab.freeflow("lab", "run", "--host", 3, "--name", "talks", "-d", "--", "sh", "-c", "echo said; exec sleep 99")
    need("said" in lab.freeflow("lab", "exec", "talks", "--", "echo", "said"), "exec")
    lab.freeflow("lab", "exec", "--host", 1, "talks", "--", "true", codes=(125,))
    end = time.monotonic() + 10
    while "said" not in lab.freeflow("lab", "logs", "talks"):
        need(time.monotonic() < end, "no log")
        time.sleep(0.02)
    lab.freeflow("lab", "stop", "--time", 0, "talks")
    need({row["name"] for row in json.loads(lab.freeflow("lab", "ps", "-a", "-o", "json")) if row["status"] == "exited"}
         == {"brief", "talks"}, "the ended ones are not listed")
    lab.freeflow("lab", "rm", "talks", "brief")


# ---- the IP path


def all_pairs_ping(containers):
    for source in containers:
        for target in containers:
            source.exec(*INSIDE, "ping", target.ip)
        source.exec(*INSIDE, "ping", source.ip.rsplit(".", 1)[0] + ".1")


def largest_packet(lab_mtu, source, target):
    mtu = lab_mtu - OVERLAY_BYTES
    need(f"mtu {mtu} " in source.exec("ip", "link", "show", "ff0"), "the vNIC's MTU does not fit")
    source.exec(*INSIDE, "ping", target.ip, mtu - ICMP_OVERHEAD_BYTES)
    source.exec(*INSIDE, "ping", target.ip, mtu - ICMP_OVERHEAD_BYTES + 1, codes=(1,))


def tcp(source, target):
    harness.in_two_containers(target, source, [*INSIDE, "tcp-serve", 7000],
                          [*INSIDE, "tcp-send", "{ip}", 7000, 20_000_000], port=7000)


# ---- what containers may not send

# A disguise, and how many datagrams to a port that is not guarded arrive: those in a VLAN and those with IPv6 extension
# headers never do.
DISGUISES = [("plain", 1), ("options", 1), ("fragments", 1), ("options-fragments", 1), ("tiny-fragments", 1),
             ("spoofed", None), ("vlan", 0), ("vlan-in-vlan", 0), ("ipv6", 1), ("ipv6-fragments", 1),
             ("ipv6-options", 0)]


def dropped(lab):
    return lab.status()["hosts"][0]["dropped"]


def link_local(container, seconds=20):
    """The container's own IPv6 address, once the kernel is sure that nobody else has it."""
    end = time.monotonic() + seconds
    while True:
        addresses = json.loads(container.exec("ip", "-j", "-6", "address", "show", "dev", "ff0"))
        for entry in addresses[0]["addr_info"] if addresses else ():
            if entry["scope"] == "link" and not entry.get("tentative"):
                return entry["local"] + "%ff0"
        need(time.monotonic() < end, f"no IPv6 address: {addresses}")
        time.sleep(0.05)


def disguised(lab, source, target, disguise, arrive):
    """Sent to UDP 4791 it is dropped and counted, once; to another port it arrives."""
    listener = target.start(*INSIDE, "listen", ROCE_PORT, OTHER_PORT)
    listener.wait_for_output("ready")
    before = dropped(lab)
    address = target.ip
    if disguise.startswith("ipv6"):
        link_local(source)
        address = link_local(target)
    source.exec(*INSIDE, "send", disguise, address, OTHER_PORT)
    need(dropped(lab) - before == (1 if arrive == 0 else 0), f"{dropped(lab) - before} dropped on another port")
    source.exec(*INSIDE, "send", disguise, address, ROCE_PORT)
    counted = dropped(lab) - before - (1 if arrive == 0 else 0)
    need(counted == 1, f"{counted} counted for one datagram")
    source.exec(*INSIDE, "send", "plain", target.ip, DONE_PORT)
    need(listener.wait(20) == 0, listener.output())
    target.background.remove(listener)
    lines = listener.output().splitlines()
    need(not any(line.startswith(f"port {ROCE_PORT} ") for line in lines), f"it arrived: {lines}")
    # A forged source address may fall to the receiver's own checks.
    count = sum(line.startswith(f"port {OTHER_PORT} ") for line in lines)
    need(arrive is None or count == arrive, f"{count} arrived on another port: {lines}")


def to_the_hosts(lab, source):
    """The routers' own sockets and the overlay's, by the gateway's address and the host's."""
    for target in ("10.111.1.1", "192.168.240.1", "192.168.240.2"):
        for port in (ROCE_PORT, 4789):
            before = dropped(lab)
            source.exec(*INSIDE, "send", "plain", target, port)
            need(dropped(lab) - before == 1, f"to {target} port {port}: {dropped(lab) - before} dropped")


# ---- faults


def cut_and_heal(lab, one, two, three):
    lab.cut(2)
    need([host["link"] for host in lab.status()["hosts"]] == ["up", "down", "up"], "the status does not show it")
    one.exec(*INSIDE, "ping", two.ip, 56, 0.6, codes=(1,))
    one.exec(*INSIDE, "ping", three.ip)
    lab.heal(2)
    one.exec(*INSIDE, "ping", two.ip, 56, 20)


def router_restarts(lab, containers):
    """A lab's host is a host like any other: its own run directory brings its router back, in its own network."""
    host = lab.host(2)
    harness.end_router(host)
    host.up()
    need(lab.status()["hosts"][1]["router_pid"] == host.router_pid(), "no new router")
    need(os.stat(f"/proc/{host.router_pid()}/ns/net").st_ino == os.stat(host.run_dir / "netns").st_ino,
         "the new router is in another network")
    all_pairs_ping(containers)
    need("192.168.240.2/24" in harness.run(host.enter("ip", "address")), "lab enter is elsewhere")


def flooded(host):
    """Hosts that get what is for nobody known."""
    lines = harness.run(host.enter("bridge", "fdb", "show")).splitlines()
    return {line.split()[line.split().index("dst") + 1] for line in lines if line.startswith("00:00:00:00:00:00")}


def overlay_follows_the_peers(lab):
    host = lab.host(1)
    path = host.run_dir / "peers.json"
    text = path.read_text()
    need(flooded(host) == {"192.168.240.2", "192.168.240.3"}, f"{flooded(host)}")
    fewer = json.loads(text)
    fewer["peers"] = [peer for peer in fewer["peers"] if peer["host"] != "host3"]
    path.write_text(json.dumps(fewer))
    host.freeflow("peers", "reload")
    need(flooded(host) == {"192.168.240.2"}, f"{flooded(host)} after one has gone")
    path.write_text(text)
    host.freeflow("peers", "reload")
    need(flooded(host) == {"192.168.240.2", "192.168.240.3"}, f"{flooded(host)} after it is back")


def down_leaves_nothing(lab, before):
    own = own_namespaces(lab.path)
    need(len(own) == 4 and own <= namespaces(), "the lab has not its namespaces")
    lab.freeflow("lab", "down", codes=(1,))
    inside = lab.host(1).enter(*lab.command("lab", "down", "--force"))
    need("from outside" in harness.run(inside, codes=(1,)), "a lab is ended from within")
    lab.freeflow("lab", "down", "--force")
    need_nothing_left(lab.run_dir, before, own)
    lab.freeflow("lab", "down")


# ---- labs that were never finished


def freeflow(run_dir, *words, codes=(0,)):
    return harness.run([DIST / "bin" / "freeflow", "--run-dir", run_dir, "lab", *words], codes=codes)


def killed(run_dir, trace, before):
    """`lab up` is killed once it has made a certain file."""
    command = [DIST / "bin" / "freeflow", "--run-dir", run_dir, "lab", "up", "--hosts", "12"]
    running = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL)
    path = run_dir / "labs" / "lab" / trace
    while not path.exists() and running.poll() is None:
        pass
    finished = running.poll() is not None
    running.kill()
    running.wait()
    freeflow(run_dir, "up", "--hosts", 2, codes=(1,))
    own = own_namespaces(run_dir / "labs" / "lab") - {os.stat("/proc/self/ns/net").st_ino}
    freeflow(run_dir, "down", "--force")
    need_nothing_left(run_dir, before, own)
    return "it was through already" if finished else None


def killed_with_containers(run_dir, before):
    """Everything of a lab dies at once: routers, supervisors."""
    freeflow(run_dir, "up", "--hosts", 2)
    freeflow(run_dir, "run", "--host", 1, "--name", "a", "-d", "--", "sleep", "infinity")
    row = json.loads(freeflow(run_dir, "ps", "-o", "json"))[0]
    own = own_namespaces(run_dir / "labs" / "lab")
    pids = [host["router_pid"] for host in json.loads(freeflow(run_dir, "status", "-o", "json"))["hosts"]]
    for pid in (*pids, row["supervisor_pid"]):
        os.kill(pid, signal.SIGKILL)
    freeflow(run_dir, "down", "--force")
    need_nothing_left(run_dir, before, own)


def two_at_once(run_dir, before):
    """Two labs of one run directory have the same addresses and never meet."""
    words = [[str(DIST / "bin" / "freeflow"), "--run-dir", str(run_dir), "lab", "up", "--hosts", "2", "--name", name,
              "--mtu", mtu] for name, mtu in (("big", "9000"), ("small", "1280"))]
    both = [Running(command) for command in words]
    for running in both:
        need(running.wait(60) == 0, running.output())
    freeflow(run_dir, "status", codes=(1,))  # which one?
    for name, mtu in (("big", 9000), ("small", 1280)):
        freeflow(run_dir, "run", "--lab", name, "--host", 1, "--name", "a", "-d", "--", "sleep", "infinity")
        text = freeflow(run_dir, "exec", "--lab", name, "a", "--", "ip", "link", "show", "ff0")
        need(f"mtu {mtu - OVERLAY_BYTES} " in text, text)
    freeflow(run_dir, "run", "--lab", "big", "--host", 2, "--name", "b", "-d", "--", "sleep", "infinity")
    freeflow(run_dir, "exec", "--lab", "big", "a", "--", *INSIDE, "ping", "10.111.2.2", 8950 - ICMP_OVERHEAD_BYTES)
    freeflow(run_dir, "exec", "--lab", "small", "a", "--", *INSIDE, "ping", "10.111.2.2", 56, 0.6, codes=(1,))
    freeflow(run_dir, "down", "--lab", "big", "--force")
    need([row["name"] for row in json.loads(freeflow(run_dir, "ps", "-o", "json"))] == ["a"], "the other lab suffered")
    freeflow(run_dir, "down", "--force")
    need_nothing_left(run_dir, before)


def refusals(run_dir, before):
    for words, said in [(("up", "--hosts", 0), "1 to 32"), (("up", "--hosts", 33), "1 to 32"),
                        (("up", "--hosts", 2, "--mtu", 1279), "1280 to 9000"),
                        (("up", "--hosts", 2, "--mtu", 9001), "1280 to 9000"),
                        (("up", "--hosts", 2, "--name", "../x"), "can't be a lab's name"),
                        (("status",), "freeflow lab up"), (("cut", "--host", 1), "freeflow lab up")]:
        text = freeflow(run_dir, *words, codes=(1,))
        need(said in text and len(text.splitlines()) == 1, f"{words}: {text}")
    need("no lab" in freeflow(run_dir, "down"), "down without a lab")
    freeflow(run_dir, "up", "--hosts", 1)
    for words, said in [(("up", "--hosts", 1), "already"), (("cut", "--host", 2), "hosts 1 to 1"),
                        (("run", "--host", 2, "--", "true"), "hosts 1 to 1"), (("exec", "x", "--", "true"), "is called")]:
        text = freeflow(run_dir, *words, codes=(1, 125))
        need(said in text, f"{words}: {text}")
    freeflow(run_dir, "down")
    need_nothing_left(run_dir, before)


@pytest.fixture(scope="module")
def before():
    return links()


@pytest.fixture(scope="module")
def lab(before):
    with Lab(hosts=3) as lab:
        yield lab


@pytest.fixture(scope="module")
def containers(lab):
    return [lab.host(number).container(name) for number, name in ((1, "one"), (2, "two"), (3, "three"))]


@pytest.fixture(scope="module")
def run_dir():
    with tempfile.TemporaryDirectory(prefix="freeflow-test.") as directory:
        run_dir = pathlib.Path(directory) / "run"
        try:
            yield run_dir
        finally:
            for name in os.listdir(run_dir / "labs") if (run_dir / "labs").exists() else ():
                freeflow(run_dir, "down", "--lab", name, "--force", codes=range(256))


def test_three_hosts_are_made_as_asked(lab):
    made_as_asked(lab)


def test_lab_ps_knows_the_hosts(lab, containers):
    ps_has_hosts(lab, containers)


def test_run_exec_logs_stop_rm(lab, containers):
    life_of_a_container(lab)


def test_ping_between_all_hosts(containers):
    all_pairs_ping(containers)


def test_largest_packet(containers):
    largest_packet(1500, *containers[:2])


def test_tcp_between_hosts(containers):
    tcp(*containers[:2])


@pytest.mark.parametrize("disguise, arrive", DISGUISES, ids=[disguise for disguise, _ in DISGUISES])
def test_udp_4791_is_dropped(lab, containers, disguise, arrive):
    disguised(lab, *containers[:2], disguise, arrive)


def test_udp_4791_to_hosts_is_dropped(lab, containers):
    to_the_hosts(lab, containers[0])


def test_host_is_cut_off_and_comes_back(lab, containers):
    cut_and_heal(lab, *containers)


def test_router_is_killed_and_comes_back(lab, containers):
    router_restarts(lab, containers)


def test_overlay_follows_the_peers_file(lab, containers):
    overlay_follows_the_peers(lab)


def test_down_leaves_nothing(lab, before):
    down_leaves_nothing(lab, before)


def test_refusals(run_dir, before):
    refusals(run_dir, before)


@pytest.mark.parametrize("trace", ["lab.json", "fabric/netns", "host5/netns", "host3/peers.json", "host2/router.pid",
                                   "host7/up.json"])
def test_lab_up_is_killed_after(run_dir, before, trace):
    killed(run_dir, trace, before)


def test_routers_and_supervisors_are_killed(run_dir, before):
    killed_with_containers(run_dir, before)


def test_two_labs_at_once(run_dir, before):
    two_at_once(run_dir, before)
