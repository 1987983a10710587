"""Three hosts that become a cluster by tokens: an authority, `init`, a controller, and hosts that join.

The cases go in this order, on one laboratory: what one leaves, the next one finds.
"""

import base64
import json
import signal
import subprocess
import time

import pytest

import harness
from harness import need
from harness.cluster import HOSTS, JoiningHosts
from harness.etcd import PEER_PORT
from harness.processes import run
from harness.settings import PORT

RED = """
apiVersion: freeflow.io/v1
kind: Network
metadata: {name: red}
spec: {tenant: red, cidrs: [10.50.0.0/24]}
"""


@pytest.fixture(scope="module")
def hosts():
    harness.require_commands("etcd", "etcdctl", "openssl", "ibv_rc_pingpong")
    # As real hosts should be: all of them learn by the token that packets are sealed.
    hosts = JoiningHosts("--sealed")
    hosts.first = None
    yield hosts
    hosts.close()


def pingpong(hosts, one, two, network):
    """Between a container on each of two hosts."""
    server = hosts.host(one).container(f"server{one}", "--network", network)
    client = hosts.host(two).container(f"client{two}", "--network", network)
    try:
        words = ["ibv_rc_pingpong", "-g", "0", "-p", PORT]
        harness.in_two_containers(server, client, words, [*words, "{ip}"])
        return server.ip, client.ip
    finally:
        server.remove()
        client.remove()


def fields(token):
    text = token.removeprefix("ff1.")
    return json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))


def ctl(hosts, certificate, key, *words):
    """etcdctl with any certificate; its exit status and all that it prints."""
    directory = hosts.etcd.directory
    command = hosts.host(1).enter("env", "ETCDCTL_API=3", "etcdctl", "--endpoints", hosts.etcd.url(1), "--cacert", directory / "ca.pem",
                                  "--cert", certificate, "--key", key, *words)
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=20)
    return done.returncode, done.stdout


def refused(done, words):
    need(done[0] != 0 and "permission denied" in done[1], f"{words}: {done}")


def asks_a_member(hosts, certificate, key):
    """What a member of etcd answers to another one with this certificate, by HTTP; empty: its TLS refuses that."""
    directory, address = hosts.etcd.directory, hosts.etcd.addresses[0]
    command = hosts.host(1).enter("openssl", "s_client", "-connect", f"{address}:{PEER_PORT}", "-CAfile", directory / "peer-ca.pem",
                                  "-verify_return_error", "-cert", certificate, "-key", key, "-quiet")
    request = f"GET /members HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    done = subprocess.run([str(word) for word in command], input=request, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                          timeout=20)
    return done.stdout


def admitted(hosts, name):
    """A host's entry among those that were admitted, as etcd has it."""
    return hosts.etcd.ctl("get", "--print-value-only", f"/freeflow/admission/data/hosts/{name}")


def test_an_authority_is_made_once(hosts):
    directory = hosts.etcd.directory
    need("--client-cert-auth" in hosts.etcd.flags, hosts.etcd.flags)
    for path in directory.iterdir():
        if path.suffix in (".key", ".json"):
            need(path.stat().st_mode & 0o077 == 0, f"{path} is not secret")
    for name in (*(f"etcd-{address}" for address in hosts.etcd.addresses), "root", "operator"):
        run(["openssl", "verify", "-x509_strict", "-CAfile", directory / "ca.pem", directory / f"{name}.pem"], 20)
    for address in hosts.etcd.addresses:
        run(["openssl", "verify", "-x509_strict", "-CAfile", directory / "peer-ca.pem", directory / f"etcd-{address}-peer.pem"], 20)
        need(f"--peer-trusted-ca-file peer-ca.pem --peer-cert-file etcd-{address}-peer.pem" in hosts.etcd.flags, hosts.etcd.flags)
    need("peer-ca" not in hosts.controller.read_text(), "a controller needs no key of etcd's members")
    again = hosts.host(1).freeflow("cluster", "authority", directory, "--etcd", "192.0.2.1", codes=(1,))
    need("there already" in again, again)


def test_a_cluster_is_made_with_rights_and_a_first_token(hosts):
    made = hosts.as_controller("cluster", "init")
    need("root, operator are made" in made and "is made in etcd" in made and "--join ff1." in made, made)
    hosts.first = made[made.index("ff1."):].split()[0]
    again = hosts.as_controller("cluster", "init")
    need("there already" in again and "ff1." not in again, again)
    need("names no authority" in hosts.as_operator("cluster", "token", "create", codes=(1,)), "an operator has no key to sign with")


def test_without_a_controller_nobody_is_let_in(hosts):
    failure = hosts.join(2, hosts.first, "--join-time", "2", codes=(1,))
    need("no controller has answered in 2 s" in failure, failure)
    need(not (hosts.host(2).run_dir / "cluster" / "cluster.json").exists(), "something half-done is left")


def test_hosts_join_and_find_each_other(hosts):
    hosts.up_controller(1)
    for number in HOSTS[1:]:
        hosts.join(number, hosts.first)
    hosts.wait_for_all()
    ranges = {host["default_range"] for host in hosts.status()["hosts"]}
    need(ranges == {"10.111.0.0/24", "10.111.1.0/24", "10.111.2.0/24"}, f"{ranges}")
    hosts.wait("peers", lambda: all(
        len(peers := json.loads(hosts.host(n).freeflow("peers", "ls", "-o", "json"))["peers"]) == 2
        and all(peer["state"] == "up" for peer in peers) for n in HOSTS))
    files = [json.loads((hosts.host(n).run_dir / "cluster" / "peers.json").read_text()) for n in HOSTS]
    need(all(file["wire"] == "sealed" for file in files), f"{files}")
    pingpong(hosts, 1, 3, "default")
    hosts.apply(RED)
    hosts.wait("all have it", lambda: all(hosts.network(n, "red") for n in HOSTS))
    pingpong(hosts, 2, 3, "red")
    need("admitted by token" in hosts.log(1), hosts.log(1))
    overlapping = RED.replace("red", "bad").replace("10.50.0.0/24", "10.111.2.128/25")
    need("addresses of it in its network default" in hosts.apply(overlapping, codes=(3,)), "a network took hosts' addresses")


def test_up_again_needs_nothing(hosts):
    host = hosts.host(3)
    harness.end_router(host, signal.SIGKILL)
    host.freeflow("up")
    hosts.wait_for_all()
    # A controller, too.
    harness.end_router(hosts.host(1), signal.SIGKILL)
    hosts.host(1).freeflow("up", "--cluster", hosts.controller)
    hosts.wait_for_all()


def test_certificates_may_what_they_have_to(hosts):
    token = hosts.token()
    path = hosts.lab.directory / "join.pem"
    key = hosts.lab.directory / "join.key"
    path.write_text(fields(token)["cert"])
    key.write_text(fields(token)["key"])
    for words in (["get", "--prefix", "/freeflow/admission/"], ["get", "--prefix", "/freeflow/declared/"],
                  ["put", "/freeflow/hosts/host2/data/record", "x"], ["put", "/freeflow/admission/data/tokens/x", "x"],
                  ["get", "--prefix", "/freeflow/requests/"], ["put", f"/freeflow/requests/{fields(hosts.first)['id']}/data/x/request", "x"],
                  ["user", "list"]):
        refused(ctl(hosts, path, key, *words), words)
    part = f"/freeflow/requests/{fields(token)['id']}/data/"
    need(ctl(hosts, path, key, "get", "--prefix", part)[0] == 0, "a token's bearer can't read its own part")
    # An operator alone has no right to take users away: a controller does, soon.
    hosts.as_operator("cluster", "token", "revoke", fields(token)["id"], at=1)
    hosts.wait("its user is gone", lambda: fields(token)["id"] not in hosts.etcd.ctl("user", "list"))
    refused(ctl(hosts, path, key, "get", "--prefix", part), part)
    need(f"join-{fields(hosts.first)['id']}" in hosts.etcd.ctl("user", "list"), "a token that is good has no user")
    own = hosts.host(2).run_dir / "cluster"
    need(ctl(hosts, own / "etcd.pem", own / "etcd.key", "get", "--prefix", "/freeflow/declared/")[0] == 0, "a host can't read")
    for words in (["put", "/freeflow/hosts/host3/data/record", "x"], ["put", "/freeflow/blocks/data/default/host2", "10.111.0.0/16"],
                  ["put", "/freeflow/admission/data/tokens/x", "x"], ["put", "/freeflow/declared/data/x", "x"],
                  ["put", f"/freeflow/requests/{fields(hosts.first)['id']}/data/x", "x"], ["user", "list"]):
        refused(ctl(hosts, own / "etcd.pem", own / "etcd.key", *words), words)
    of_controller = hosts.host(1).run_dir / "cluster"
    for words in (["put", "/freeflow/declared/data/x", "x"], ["put", "/freeflow/hosts/host2/data/record", "x"], ["user", "list"]):
        refused(ctl(hosts, of_controller / "etcd.pem", of_controller / "etcd.key", *words), words)


def test_no_client_is_a_member_of_etcd(hosts):
    """Members ask each other for no rights: who is taken for one writes what it likes."""
    directory = hosts.etcd.directory
    # etcd looks whether a member's certificate has the address that it comes from.
    server = directory / f"etcd-{hosts.etcd.addresses[0]}"
    peer = f"{server}-peer"
    need("clientURLs" in asks_a_member(hosts, f"{peer}.pem", f"{peer}.key"), "a member is refused")
    own = [hosts.host(number).run_dir / "cluster" / "etcd" for number in (1, 2)]
    join = hosts.lab.directory / "join"
    for name in (join, *own, directory / "root", directory / "operator", server):
        answer = asks_a_member(hosts, f"{name}.pem", f"{name}.key")
        need(not answer, f"{name} is a member: {answer}")


def test_bad_tokens_are_refused_with_the_reason(hosts):
    def refusal(token, *options, **more):
        return hosts.join(3, token, "--join-time", "20", *options, codes=(1, 3), **more)

    good = hosts.token()
    need("missing or changed" in refusal(good[:200]), "half a token")
    need("begins with ff1." in refusal("secret"), "no token")
    hosts.as_operator("cluster", "token", "revoke", fields(good)["id"], at=1)
    need("was revoked" in refusal(good, name="other"), "a revoked token")
    short = hosts.token("--expires", "1s")
    hosts.wait("it expires", lambda: "has expired" in hosts.as_operator("cluster", "token", "list", at=1))
    need("has expired" in refusal(short, name="other"), "an expired token")
    # Another machine under a name that is there: its run directory is empty, so its key is another one.
    taken = refusal(hosts.token(), name="host2")
    need("has a host host2 with another key" in taken and "freeflow cluster remove host2" in taken, taken)
    # With another token's key and certificate.
    one, two = hosts.token(), hosts.token()
    forged = fields(one) | {"key": fields(two)["key"], "cert": fields(two)["cert"]}
    text = "ff1." + base64.urlsafe_b64encode(json.dumps(forged).encode()).decode().rstrip("=")
    need("lets nobody in by the token" in refusal(text, name="other"), "a forged request")
    used = json.loads(hosts.as_operator("cluster", "token", "list", "-o", "json", at=1))
    first = next(row for row in used if row["id"] == fields(hosts.first)["id"])
    need(first["used_by"] == ["host2", "host3"] and first["uses_left"] == 14, f"{used}")
    need("host other is refused" in hosts.log(1), hosts.log(1))


def test_a_host_that_was_removed_joins_anew_and_its_old_certificate_is_nobodys(hosts):
    old = hosts.lab.directory / "old"
    harness.run(["cp", "-r", hosts.host(2).run_dir / "cluster", old], 10)
    hosts.as_operator("cluster", "remove", "host2", at=1)
    hosts.as_operator("cluster", "remove", "host3", at=1)
    hosts.wait("its user is gone", lambda: not admitted(hosts, "host2") and not admitted(hosts, "host3"))
    token = hosts.token()
    hosts.join(2, token)
    state = hosts.lab.directory / "state3"
    used = hosts.join(3, token, "--state", state, codes=(1,))
    need("used up, by host2" in used, used)
    hosts.join(3, hosts.token(), "--state", state)
    hosts.wait_for_all()
    need(ctl(hosts, old / "etcd.pem", old / "etcd.key", "put", "/freeflow/hosts/host2/data/record", "x")[0] != 0,
         "a host that was removed still writes")
    pingpong(hosts, 2, 3, "red")


def test_a_state_that_outlives_down_is_a_host_again(hosts):
    """With the same key, certificate and addresses, and without a token."""
    host, state = hosts.host(3), hosts.lab.directory / "state3"
    before = next(row for row in hosts.status(at=1)["hosts"] if row["name"] == "host3")
    certificate = (state / "cluster" / "etcd.pem").read_text()
    host.freeflow("down", "--force")
    host.freeflow("up", "--state", state)
    hosts.wait_for_all()
    after = next(row for row in hosts.status(at=1)["hosts"] if row["name"] == "host3")
    need(all(before[field] == after[field] for field in ("address", "public_key", "default_range")), f"{before} {after}")
    # A token renews its certificate, and is not used up by that.
    token = hosts.token()
    hosts.join(3, token, "--state", state)
    need((state / "cluster" / "etcd.pem").read_text() != certificate, "the certificate is the same")
    left = {row["id"]: row["uses_left"] for row in json.loads(hosts.as_operator("cluster", "token", "list", "-o", "json", at=1))}
    need(left[fields(token)["id"]] == 1, f"{left}")
    hosts.wait_for_all()


def test_certificates_are_renewed_before_they_end(hosts):
    """At half of their time, which the host has in a file."""
    for directory in (hosts.lab.directory / "state3" / "cluster", hosts.host(1).run_dir / "cluster"):
        certificate, joined = directory / "etcd.pem", directory / "joined.json"
        before, values = certificate.read_text(), json.loads(joined.read_text())
        need(values["renew_s"] > time.time() + 180 * 86400, f"{values}")
        joined.write_text(json.dumps(values | {"renew_s": 1}))
        hosts.wait("another certificate", lambda: certificate.read_text() != before)
        hosts.wait("it is noted", lambda: json.loads(joined.read_text())["renew_s"] > time.time())
        run(["openssl", "verify", "-x509_strict", "-CAfile", hosts.etcd.directory / "ca.pem", certificate], 20)
    need("has another certificate" in hosts.log(1), hosts.log(1))
    hosts.wait_for_all()


def test_a_second_controller_goes_on_when_the_first_is_down(hosts):
    hosts.as_operator("cluster", "remove", "host2", at=1)
    hosts.wait("its user is gone", lambda: not admitted(hosts, "host2"))
    hosts.up_controller(2)
    hosts.host(1).freeflow("down", "--force")
    hosts.as_operator("cluster", "remove", "host3", at=2)
    hosts.join(3, hosts.token())
    hosts.wait_for_all(hosts=(2, 3))
    need("host host3 is admitted" in hosts.log(2), hosts.log(2))


def test_for_trials_etcd_may_be_without_tls(hosts):
    directory = hosts.lab.directory / "plain"
    directory.mkdir()
    url = f"http://{hosts.etcd.addresses[0]}:12379"
    file = directory / "cluster.json"
    file.write_text(json.dumps({"etcd": [url], "controller": True}))
    peer = f"http://{hosts.etcd.addresses[0]}:12380"
    words = ["etcd", "--data-dir", directory / "data", "--listen-client-urls", url, "--advertise-client-urls", url,
             "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
    with open(directory / "log", "wb") as log:
        etcd = subprocess.Popen([str(word) for word in hosts.host(1).enter(*words)], stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def init(pool, codes):
        host = hosts.host(1)
        return run(host.enter(host.freeflow_path, "cluster", "init", "--cluster", file, "--pool", pool), 30, codes=codes)
    try:
        for number in HOSTS:
            hosts.host(number).freeflow("down", "--force")
        made = hosts.wait("a cluster", lambda: init("10.99.0.0/16", (0,)))
        other = init("10.98.0.0/16", (1,))
        need("keeps that" in other, other)
        hosts.host(1).freeflow("up", "--cluster", file, "--host", "host1")
        hosts.join(2, made[made.index("ff1."):].split()[0])
        hosts.host(1).freeflow("up", "--cluster", file)
        # By the file that it follows by.
        words = hosts.host(2).enter(*hosts.host(2).command("cluster", "status", "-o", "json"))
        rows = hosts.wait("both follow", lambda: len(rows := json.loads(run(words, 30))["hosts"]) == 2 and rows)
        need([row["default_range"] for row in rows] == ["10.99.0.0/24", "10.99.1.0/24"], f"{rows}")
        hosts.wait("peers", lambda: "up" in hosts.host(2).freeflow("peers", "ls"))
        pingpong(hosts, 1, 2, "default")
    finally:
        etcd.kill()
        etcd.wait(20)


def test_down_leaves_nothing(hosts):
    for number in HOSTS:
        hosts.host(number).freeflow("down", "--force")
        need(not (hosts.host(number).run_dir / "cluster").exists(), "its directory is left")
