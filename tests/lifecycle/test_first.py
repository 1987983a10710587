"""The first five minutes: `freeflow test connectivity` and `freeflow bugreport`."""

import json
import os
import signal
import subprocess
import tarfile
import time

import pytest

import harness
from harness import Lab, need, settings
from harness.host import kill_router
from harness.page import blocks, examples, fits
from harness.settings import ROOT

RULES = """
apiVersion: freeflow.io/v1
kind: Network
metadata: {name: closed}
spec: {tenant: closed, cidrs: [10.50.0.0/24], access: deny}
---
apiVersion: freeflow.io/v1
kind: AccessRule
metadata: {name: clients}
spec:
  tenant: closed
  from: {labels: {tier: client}}
  to: {labels: {tier: server}}
  direction: fromTo
  action: allow
"""
OPEN = {"plain IP", "full packets", "TCP", "RC connect", "RC SEND", "RC WRITE", "RC READ", "RC atomics", "RC latency", "UD", "rdma_cm"}
DENIED = {"RC denied", "UD denied", "rdma_cm denied"}
SECRET = "sEcReT-of-this-test"


def connectivity(host, *words, codes=(0,), seconds=120):
    return json.loads(host.freeflow("test", "connectivity", "-o", "json", *words, codes=codes, seconds=seconds).split("\nfreeflow:")[0])


def names(report, pair):
    rows = [check for check in report["checks"] if (check["network"], check["from"], check["to"]) == pair]
    bad = [check for check in rows if check["verdict"] in ("failed", "skipped")]
    need(not bad, f"{pair}: {bad}")
    return {check["name"] for check in rows}


def nothing_is_left(host):
    need(json.loads(host.freeflow("ps", "-a", "-o", "json")) == [], "a container of the test is left")
    need(host.status()["vnics"] == [], "a vNIC of the test is left")


@pytest.fixture(scope="module")
def closed(host):
    file = host.directory / "rules.yaml"
    file.write_text(RULES)
    host.freeflow("apply", "-f", file)


def test_each_network_and_two_tenants(host, closed):
    me = host.status()["host"]
    report = connectivity(host)
    need(report["passed"], report)
    need(names(report, ("default", me, me)) == OPEN, report)
    need(names(report, ("closed", me, me)) == DENIED | {"plain IP", "full packets", "TCP"}, report)
    for between in ("closed -> default", "default -> closed"):
        need(names(report, (between, me, me)) == DENIED, report)
    nothing_is_left(host)


def test_labels_choose_what_rules_say(host, closed):
    me = host.status()["host"]
    there = ("--network", "closed", "--label", "tier=client", "--to-label", "tier=server")
    need(names(connectivity(host, *there), ("closed", me, me)) == OPEN, "a client is not let through")
    back = ("--network", "closed", "--label", "tier=server", "--to-label", "tier=client")
    by_hand = OPEN - {"UD", "rdma_cm"} | {"UD denied", "rdma_cm denied"}
    need(names(connectivity(host, *back), ("closed", me, me)) == by_hand, "a server may begin")
    output = host.freeflow("test", "connectivity", "--network", "none", codes=(1,))
    need("no network is called" in output, output)


def test_an_end_that_is_not_there_is_a_failure(host):
    report = connectivity(host, "--peer", "10.111.255.250", codes=(1,))
    need(not report["passed"] and report["checks"][-1]["verdict"] == "failed" and report["checks"][-1]["remedy"], report)
    nothing_is_left(host)


def test_a_signal_leaves_nothing(host):
    process = subprocess.Popen(host.command("test", "connectivity"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    line = process.stdout.readline()
    need(line.startswith("ok"), line)
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=60)
    need(process.returncode == 130 and "interrupted" in rest, rest)
    nothing_is_left(host)


def test_two_hosts_a_cut_and_an_answering_end():
    with Lab(2, 1500) as lab:
        lab.wait_for_peers()
        report = connectivity(lab, "--lab")
        for one, other in (("host1", "host2"), ("host2", "host1")):
            need(names(report, ("default", one, other)) == OPEN | {"loss", "clocks"}, report)
            need(names(report, ("-", one, other)) == {"router"}, report)
        first, second = lab.hosts
        log = lab.directory / "respond.log"
        with open(log, "w") as out:
            answering = subprocess.Popen(second.command("test", "connectivity", "--respond"), stdout=out, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + 20
            while "--peer " not in log.read_text():
                need(time.monotonic() < end and answering.poll() is None, log.read_text())
                time.sleep(0.05)
            address = log.read_text().split("--peer ")[1].split()[0]
            for _ in range(2):
                report = connectivity(first, "--peer", address)
                need(names(report, ("default", "host1", address)) == OPEN | {"loss", "clocks"}, report)
            lab.cut(2)
            report = connectivity(first, "--peer", address, codes=(1,))
            need(not report["passed"], report)
        finally:
            answering.terminate()
            answering.wait(40)
        for host in lab.hosts:
            nothing_is_left(host)


# ---- bugreport


def members(path):
    with tarfile.open(path) as archive:
        return {member.name.partition("/")[2]: archive.extractfile(member).read() for member in archive.getmembers()}


def test_a_report_has_no_secrets(host, tmp_path):
    """Secrets are where an operator or a tenant may have put them."""
    container = host.container("plain", "--env", f"DB_PASSWORD={SECRET}", "--label", f"access-token={SECRET}")
    other = harness.Running(host.command("run", "--rm", "--name", "talks", "--", "sh", "-c", f"echo {SECRET}; exec sleep 60 # {SECRET}"))
    try:
        other.wait_for_output(SECRET)
        with open(host.run_dir / "router.log", "a") as log:
            log.write(f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n-----END PRIVATE KEY-----\n")
            log.write(f"--join ff1.{SECRET} password={SECRET}\nhttps://root:{SECRET}@192.0.2.1:2379\nlast line\n")
        (host.run_dir / "host.key").write_text(SECRET)
        settings = json.loads((host.run_dir / "up.json").read_text())
        files = {}
        for name in ("peers", "cluster"):
            files[name] = host.directory / f"{name}.json"
            files[name].write_text(json.dumps({"host": "h1", "key_file": SECRET, "inline": SECRET, "cacert": SECRET,
                                               "etcd": [f"https://u:{SECRET}@192.0.2.1:2379"]}))
        (host.run_dir / "up.json").write_text(json.dumps({**settings, **{name: str(file) for name, file in files.items()}}))
        path = tmp_path / "report.tar"
        try:
            host.freeflow("bugreport", "-o", path, seconds=120)
        finally:
            (host.run_dir / "up.json").write_text(json.dumps(settings))
        need(path.stat().st_mode & 0o777 == 0o600, "others can read the report")
        need(SECRET.encode() not in path.read_bytes(), [name for name, content in members(path).items() if SECRET.encode() in content])
        parts = members(path)
        for name in ("report.txt", "versions.txt", "kernel.txt", "doctor.json", "status.json", "containers.json", "declared/networks.json",
                     "metrics.txt", "up.json", "peers-file.json", "cluster-file.json", "router.log", "audit.log", "mounts.txt", "links.txt"):
            need(parts.get(name), f"{name} is missing: {parts['report.txt'].decode()}")
        need(json.loads(parts["containers.json"])[0]["command"] == ["sleep"], "arguments of a container are in the report")
        need(b"last line" in parts["router.log"] and b"[removed]" in parts["router.log"], "the log is not whole")
        need(json.loads(parts["peers-file.json"]) == {"host": "h1"}, parts["peers-file.json"])
    finally:
        other.kill()
        container.remove()


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_half_report(host, tmp_path, which):
    process = subprocess.Popen(host.command("bugreport", "-o", tmp_path / "report.tar"), stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)
    while not list(tmp_path.iterdir()):
        need(process.poll() is None, "it ended without a report")
    process.send_signal(which)
    output, _ = process.communicate(timeout=60)
    need(process.returncode == 130 and "interrupted" in output, f"{process.returncode}: {output}")
    need(list(tmp_path.iterdir()) == [], list(tmp_path.iterdir()))


def test_a_report_of_a_dead_router_and_of_hostile_files(tmp_path):
    with harness.Host() as host:
        kill_router(host)
        secret = tmp_path / "shadow"
        secret.write_text(SECRET)
        (host.run_dir / "audit.log").unlink(missing_ok=True)
        (host.run_dir / "audit.log").symlink_to(secret)
        os.mkfifo(host.run_dir / "cluster.log")
        with open(host.run_dir / "router.log", "a") as log:
            log.write("0123456789abcde\n" * (1 << 20))  # 16 MiB
        path = tmp_path / "report.tar"
        host.freeflow("bugreport", "-o", path, seconds=120)
        parts = members(path)
        text = parts["report.txt"].decode()
        need("no router runs" in text and "audit.log" not in parts and "cluster.log" not in parts, text)
        need(SECRET.encode() not in path.read_bytes(), "a link was followed")
        need(1 << 20 < len(parts["router.log"]) <= 4 << 20, len(parts["router.log"]))
        before = path.read_bytes()
        output = host.freeflow("bugreport", "-o", path, codes=(1,))
        need("is there already" in output and path.read_bytes() == before, output)
        host.freeflow("bugreport", "-o", "/dev/full/x", codes=(1,))
        host.up()


# ---- docs/QUICKSTART.md

DOCUMENT = (ROOT / "docs" / "QUICKSTART.md").read_text()
EXAMPLES = list(examples(blocks(DOCUMENT), "QUICKSTART.md"))


@pytest.mark.parametrize("files, content, expected", EXAMPLES)
def test_example(host, files, content, expected):
    harness.require_commands("ib_write_bw", "rping", "ucx_perftest", "mpirun", "mpicc")
    programs = [settings.DIST / "bin", ROOT / "deploy" / "ci"]
    environment = {**os.environ, "PATH": ":".join([*map(str, programs), os.environ["PATH"], "/usr/sbin", "/sbin"]),
                   "FREEFLOW_RUN_DIR": str(host.run_dir)}
    process = subprocess.run(["timeout", "-k", "5", "120", "sh", "-e", "-c", content], cwd=host.directory, env=environment, text=True,
                             stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    need(process.returncode == 0 and expected and fits(expected, process.stdout), f"{process.returncode}:\n{process.stdout}")


def test_the_page_has_examples():
    need(len(EXAMPLES) == 3, [example.id for example in EXAMPLES])
