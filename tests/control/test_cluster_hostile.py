"""A host that was taken over: what its own certificate lets it do in etcd, and what the others believe of it. Then etcd
is full, by that host's doing.

The cases go in this order, on one laboratory: what one leaves, the next one finds.
"""

import json
import os
import signal

import pytest

import harness
from harness import need
from harness.cluster import HOSTS, Hosts, following
from harness.failure import Failure

DECLARED = """
apiVersion: freeflow.io/v1
kind: Network
metadata: {name: red}
spec: {tenant: red, cidrs: [10.50.0.0/16]}
---
apiVersion: freeflow.io/v1
kind: Vnic
metadata: {name: database}
spec: {network: red}
"""
MORE = """
apiVersion: freeflow.io/v1
kind: Network
metadata: {name: NAME}
spec: {tenant: red, cidrs: [CIDR]}
"""
BAD = "host3"
# Bytes that etcd takes before it is full: some hundred times what the cluster itself needs.
QUOTA_BYTES = 48 << 20
FLOOD_BYTES = 1 << 20


class HostileHosts(Hosts):
    etcd_options = {"more": ["--quota-backend-bytes", str(QUOTA_BYTES)]}

    def as_bad(self, *words, ok=True, before=()):
        """etcdctl with the certificate of host 3, without its follower."""
        command = [*before, "etcdctl", "--endpoints", ",".join(self.etcd.urls()), "--cacert", "ca.pem", "--cert", f"{BAD}.pem",
                   "--key", f"{BAD}.key", *words]
        command = self.lab.host(3).enter("env", f"--chdir={self.etcd.directory}", "ETCDCTL_API=3", *command)
        printed = harness.run(command, 30, codes={True: (0,), False: (1,), None: (0, 1)}[ok])
        need(ok is not False or "permission denied" in printed, printed)
        return printed

    def put(self, key, value, **options):
        path = self.etcd.directory / "value"
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return self.as_bad("put", f"/freeflow/{key}", before=("sh", "-c", 'exec "$@" < "$0"', path), **options)

    def own(self, key):
        lines = self.as_bad("get", f"/freeflow/{key}", "--print-value-only")
        return json.loads(lines)

    def problems(self, at, about):
        """What a host says of another one."""
        rows = {row["name"]: row for row in self.status(at=1)["hosts"]}
        return [problem["message"] for problem in rows[at]["problems"] if problem["name"] == about]


@pytest.fixture(scope="module")
def hosts():
    harness.require_commands("etcd", "etcdctl", "openssl", "ibv_rc_pingpong")
    with following(DECLARED, "red", kind=HostileHosts) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def taken_over(hosts):
    """Host 3 is another's now: its follower is ended, and its certificate is used by hand."""
    process = json.loads((hosts.host(3).run_dir / "cluster.pid").read_text())
    os.kill(process["pid"], signal.SIGKILL)
    return hosts


def traffic(hosts, one=1, two=2):
    """RDMA between new containers of two hosts."""
    server = hosts.host(one).container(f"server{one}", "--network", "red")
    client = hosts.host(two).container(f"client{two}", "--network", "red")
    try:
        words = ["ibv_rc_pingpong", "-g", "0", "-n", "10", "-p", harness.PORT]
        harness.in_two_containers(server, client, words, [*words, "{ip}"])
    finally:
        server.remove()
        client.remove()


def peers(hosts, number):
    rows = json.loads(hosts.host(number).freeflow("peers", "ls", "-o", "json"))["peers"]
    return {row["host"]: (row["address"], row["state"]) for row in rows}


def test_its_certificate_writes_of_itself_alone(taken_over):
    hosts = taken_over
    need("red" in hosts.as_bad("get", "--prefix", "/freeflow/declared/"), "it reads what is declared")
    def keys():
        """Those that nobody else writes meanwhile."""
        lines = hosts.as_bad("get", "--prefix", "/freeflow/", "--keys-only").splitlines()
        kept = tuple(f"/freeflow/{part}/data/" for part in ("declared", "blocks", "cluster"))
        return [line for line in lines if line.startswith(kept) or line.endswith("/record")]
    before = keys()
    for key in ("hosts/host1/data/record", "hosts/host1/data/holdings", "said/host1/data/followed", "vnics/host1/data/0",
                "hosts/host33/data/record", "blocks/data/red/host3", "places/data/database", "places/data/serial",
                "declared/data/serial", "cluster/data/identity", "admission/data/x", "requests/x/data/y"):
        hosts.put(key, "{}", ok=False)
        hosts.as_bad("del", f"/freeflow/{key}", ok=False)
    hosts.as_bad("del", "--prefix", "/freeflow/", ok=False)
    hosts.as_bad("put", "/other", "x", ok=False)
    for words in (("user", "list"), ("user", "add", "me", "--no-password"), ("user", "grant-role", BAD, "root"),
                  ("role", "grant-permission", BAD, "readwrite", "--prefix", "/"), ("auth", "disable")):
        hosts.as_bad(*words, ok=False)
    need(keys() == before and before, f"keys have come or gone: {before} {keys()}")


def test_it_is_not_believed_to_be_another_host(taken_over):
    hosts = taken_over
    record, known = hosts.own("hosts/host3/data/record"), peers(hosts, 2)
    other = hosts.own("hosts/host1/data/record")
    for field, word in (("address", "address"), ("public_key", "key")):
        hosts.put("hosts/host3/data/record", {**record, field: other[field]})
        hosts.wait(f"others name it: {word}", lambda: any(
            f"host1 has its {word}" in problem for problem in hosts.problems("host2", BAD)))
        now = peers(hosts, 2)
        need(BAD not in now and now["host1"] == known["host1"], f"{now}")
        traffic(hosts)
    hosts.put("hosts/host3/data/record", record)
    hosts.wait("it is itself again", lambda: peers(hosts, 2) == known)


def test_it_takes_no_addresses_of_others(taken_over):
    hosts = taken_over
    record, other = hosts.own("hosts/host3/data/record"), hosts.own("hosts/host1/data/record")
    for taken in (other["default_range"], "10.50.0.0/24"):
        hosts.put("hosts/host3/data/record", {**record, "default_range": taken})
        hosts.wait(f"others name it: {taken}", lambda: any(taken in problem for problem in hosts.problems("host2", BAD)))
        traffic(hosts)
    for nonsense in ("[]", "{", "x" * 100_000, json.dumps({**record, "address": "127.0.0.1"}), json.dumps({**record, "address": 7})):
        hosts.put("hosts/host3/data/record", nonsense)
        hosts.wait("it is no host to others", lambda: BAD not in peers(hosts, 2))
    traffic(hosts)
    hosts.put("hosts/host3/data/record", record)
    hosts.wait("it is a host again", lambda: BAD in peers(hosts, 2))


def test_it_does_not_get_a_vnic_that_is_in_use(taken_over):
    """It says that it has it, that it has let others' go, and asks for it."""
    hosts = taken_over
    hosts.host(1).freeflow("run", "-d", "--rm", "--vnic", "database", "--", "sleep", "600")
    place = hosts.own("places/data/database")
    need(place["host"] == "host1", f"{place}")
    revision = json.loads(hosts.as_bad("get", "/freeflow/places/data/database", "-w", "json"))["kvs"][0]["mod_revision"]
    forged = ({"at": revision}, {"at": revision, "released": True}, {"at": revision + 1_000_000}, {"at": 0})
    for number, held in enumerate(forged):
        hosts.put("hosts/host3/data/holdings", {"vnics": {"database": held}, "claims": {"database": 7}})
        # News come in order: who has what is declared after it has heard of it.
        hosts.apply(MORE.replace("NAME", f"next{number}").replace("CIDR", f"10.6{number}.0.0/24"), at=1)
        hosts.wait("the others have followed", lambda: all(hosts.network(n, f"next{number}") for n in HOSTS[:2]))
        need(hosts.own("places/data/database") == place, f"{held}: it has moved")
    need("database" in [row["name"] for row in hosts.host(1).containers()], "its container has ended")
    hosts.host(1).freeflow("stop", "database")


def test_a_flood_of_keys_fills_nobodys_memory(taken_over):
    """All that it may write, of the longest kind, until etcd is full."""
    hosts = taken_over
    followers = {number: json.loads((hosts.host(number).run_dir / "cluster.pid").read_text())["pid"] for number in HOSTS[:2]}
    before = {number: resident_bytes(pid) for number, pid in followers.items()}
    count, kinds = 0, ("hosts/host3/data/members/", "hosts/host3/data/x", "said/host3/data/x", "vnics/host3/data/")
    try:
        while count < 4 * QUOTA_BYTES // FLOOD_BYTES:
            hosts.put(f"{kinds[count % 4]}{count}", "x" * FLOOD_BYTES)
            count += 1
    except Failure as failure:
        need("space exceeded" in str(failure) or "NOSPACE" in str(failure), f"{failure}")
    need(count < 4 * QUOTA_BYTES // FLOOD_BYTES, "etcd has no quota")
    for number, pid in followers.items():
        grown = resident_bytes(pid) - before[number]
        need(grown < QUOTA_BYTES // 2, f"the follower of host {number} has taken {grown} bytes")


def resident_bytes(pid):
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_with_a_full_etcd_all_goes_on_and_changes_say_why(taken_over):
    hosts = taken_over
    failure = hosts.apply(MORE.replace("NAME", "late").replace("CIDR", "10.52.0.0/24"), codes=(1,))
    need("etcd has no space left" in failure, failure)
    traffic(hosts)
    hosts.wait("a host says so", lambda: "no space left" in hosts.host(1).freeflow("status"))


def test_the_flood_goes_with_its_host(taken_over):
    hosts = taken_over
    failure = hosts.as_operator("cluster", "remove", BAD, at=1, codes=(1,))
    need("no space left" in failure, failure)
    # The way of docs/CLUSTER.md.
    hosts.etcd.ctl("user", "delete", BAD)
    for part in ("hosts", "said", "vnics"):
        hosts.etcd.ctl("del", "--prefix", f"/freeflow/{part}/{BAD}/")
    revision = json.loads(hosts.etcd.ctl("endpoint", "status", "-w", "json"))[0]["Status"]["header"]["revision"]
    hosts.etcd.ctl("compact", str(revision))
    hosts.etcd.ctl("defrag", seconds=60)
    hosts.etcd.ctl("alarm", "disarm")
    hosts.as_operator("cluster", "remove", BAD, at=1)
    left = hosts.etcd.ctl("get", "--prefix", "/freeflow/", "--keys-only")
    need(f"/{BAD}/" not in left, left)
    hosts.wait("changes are possible", lambda: "created" in hosts.apply(
        MORE.replace("NAME", "late").replace("CIDR", "10.52.0.0/24"), at=1))
    hosts.wait("they are followed", lambda: all(hosts.network(n, "late") for n in HOSTS[:2]))
    printed = hosts.as_bad("get", "/freeflow/cluster/data/identity", ok=None)
    need("Error" in printed, f"its certificate is somebody's: {printed}")
    need(BAD not in peers(hosts, 2), "it is believed to be a host")
    traffic(hosts)
