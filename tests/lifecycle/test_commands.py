"""Promises of the command: exit codes, signals, logs, lists, refusals; and podman by the CDI device."""

import json
import os
import signal
import subprocess
import time

import pytest

import harness
from harness import Host, Running, need, podman

VERSION_FIELDS = ("name", "ip", "network", "host", "pid")


def up_again(host):
    pid = host.router_pid()
    host.up()
    need(host.router_pid() == pid, "a second `up` started another router")


def two_hosts(host):
    with Host() as other:
        need(other.router_pid() != host.router_pid(), "two run directories share a router")
        one, two = host.container("same-name"), other.container("same-name")
        try:
            one.exec("ibv_devinfo")
            two.exec("ibv_devinfo")
        finally:
            one.remove()
            two.remove()


def exit_codes(host):
    for words, code in ((["true"], 0), (["sh", "-c", "exit 42"], 42), (["/etc/passwd"], 126), (["no-such-program"], 127),
                        (["sh", "-c", "kill -TERM $$"], 128 + signal.SIGTERM)):
        host.freeflow("run", "--rm", "--name", "code", "--", *words, codes=(code,))


def views(host):
    container = host.container("view", "--ip", pick_address(host))
    try:
        need(container.ip == pick_address(host), "not the address that was asked for")
        addresses = container.exec("ip", "-4", "-o", "addr")
        need(container.ip in addresses, addresses)
        need(container.exec("hostname").strip() == "view", "the host name is not the container's")
        processes = container.exec("ps", "-e", "-o", "args").splitlines()
        need(len(processes) < 8, f"it sees other processes: {processes}")
        need(not container.exec("sh", "-c", f"ls -A {host.run_dir} 2>/dev/null || true"), "it sees the run directory")
        need(container.exec("ls", "/run/freeflow").split() == ["router.sock", "sysfs"], "more than its own socket and sysfs is mounted")
        need(container.exec("ls", "/sys/class/net").split().__len__() == 2, "not just lo and its own interface")
    finally:
        container.remove()


def pick_address(host):
    row = json.loads(host.freeflow("network", "ls", "-o", "json"))[0]
    return row["gateway"].rsplit(".", 1)[0] + ".77"


def environment_and_volumes(host):
    (host.directory / "data").mkdir()
    (host.directory / "data" / "file").write_text("from outside")
    output = host.freeflow("run", "--rm", "-e", "COLOUR=green", "-v", f"{host.directory}/data:/mnt:ro", "--", "sh", "-c",
                           "echo $COLOUR; cat /mnt/file; touch /mnt/new 2>/dev/null && echo writable; true")
    need("green" in output and "from outside" in output and "writable" not in output, output)


def signals_pass(host):
    running = Running(host.command("run", "--rm", "--name", "trapper", "--", "sh", "-c",
                                   "trap 'echo caught; exit 9' USR1; echo ready; while :; do sleep 0.05; done"))
    try:
        running.wait_for_output("ready")
        running.process.send_signal(signal.SIGUSR1)
        code = running.wait(20)
        need(code == 9 and "caught" in running.output(), f"{code}: {running.output()}")
    finally:
        running.kill()


def lists_and_logs(host):
    host.freeflow("run", "-d", "--name", "talker", "--", "sh", "-c", "echo spoken; echo complained >&2; sleep 600")
    rows = host.containers()
    need(all(field in row for row in rows for field in VERSION_FIELDS), f"fields are missing: {rows}")
    row = next(row for row in rows if row["name"] == "talker")
    need(row["network"] == "default" and row["ip"].count(".") == 3 and row["pid"] > 0, str(row))
    end = time.monotonic() + 10
    while "complained" not in host.freeflow("logs", "talker"):
        need(time.monotonic() < end, "the logs lack what was printed")
        time.sleep(0.05)
    need("spoken" in host.freeflow("logs", "talker"), "the logs lack standard output")
    host.freeflow("run", "-d", "--name", "talker", "--", "true", codes=range(1, 128))  # the name is taken
    host.freeflow("rm", "talker", codes=range(1, 128))  # it runs
    begin = time.monotonic()
    host.freeflow("stop", "talker")
    need(time.monotonic() - begin < 15, "stop takes too long")
    need(not any(row["name"] == "talker" for row in host.containers()), "it still runs")
    host.freeflow("rm", "talker")
    host.freeflow("exec", "talker", "--", "true", codes=range(1, 128))


def status_and_doctor(host):
    status = host.status()
    for field in ("version", "pid", "mode", "qp_count", "segment_bytes", "uptime_s"):
        need(field in status, f"{field} is not in {status}")
    need("default" in host.freeflow("network", "ls"), "no network `default`")
    host.freeflow("doctor", codes=(0, 1))
    need(status["version"] in host.freeflow("version"), "another version")


def data_path_of(host):
    return {row["name"]: row["data_path"] for row in json.loads(host.freeflow("network", "list", "-o", "json"))}


def data_path(host):
    need(data_path_of(host) == {"default": "auto"}, f"{data_path_of(host)}")
    output = host.freeflow("network", "set", "nowhere", "--data-path", "routed", codes=(1,))
    need("default" in output, f"it does not say which networks there are: {output}")
    for words in (["default"], ["default", "--data-path", "sideways"], ["--data-path", "auto"]):
        host.freeflow("network", "set", *words, codes=(2,))
    host.freeflow("network", "set", "default", "--data-path", "routed")
    need("routed" in host.freeflow("network", "ls") and "routed" in host.freeflow("status"), "it is not shown")
    container = host.container("stays")
    try:
        pid = harness.end_router(host)
        host.up()
        need(host.router_pid() != pid and data_path_of(host) == {"default": "routed"}, "it did not outlive the router")
    finally:
        container.remove()
    host.freeflow("network", "set", "default", "--data-path", "auto")
    need(data_path_of(host) == {"default": "auto"}, f"{data_path_of(host)}")


def queue_pairs(host):
    return json.loads(host.freeflow("ps", "--qps", "-o", "json"))


def wait_for_qps(host, what, check, seconds=20):
    end = time.monotonic() + seconds
    while not check(rows := queue_pairs(host)):
        need(time.monotonic() < end, f"{what}: {rows}")
        time.sleep(0.02)
    return rows


def qps_at_work(host):
    """A pair that never ends by itself, while the policy changes."""
    one, two = host.pair()
    try:
        need(queue_pairs(host) == [], "there are QPs already")
        words = ["ibv_rc_pingpong", "-g", "0", "-n", "100000000"]
        one.wait_for_port(one.start(*words))
        client = two.start(*words, one.ip)
        rows = wait_for_qps(host, "no pair at work", lambda rows: [row["state"] for row in rows] == ["RTS", "RTS"])
        need([row["name"] for row in rows] == ["one", "two"] == [row["peer_name"] for row in reversed(rows)], f"{rows}")
        need([row["qpn"] for row in rows] == [row["peer_qpn"] for row in reversed(rows)], f"{rows}")
        need(all((row["reason"] is None) == (row["path"] == "direct") and row["type"] == "RC" for row in rows), f"{rows}")
        table = host.freeflow("ps", "--qps")
        need(all(f"0x{row['qpn']:06x}" in table and row["path"] in table for row in rows), table)
        host.freeflow("network", "set", "default", "--data-path", "routed")
        wait_for_qps(host, "not by policy", lambda rows: {(row["path"], row["reason"]) for row in rows} == {("routed", "policy")})
        before = host.status()["counters"]["messages"]
        end = time.monotonic() + 20
        while host.status()["counters"]["messages"] <= before + 100:
            need(client.process.poll() is None and time.monotonic() < end, f"it stands still:\n{client.output()}")
            time.sleep(0.02)
        host.freeflow("network", "set", "default", "--data-path", "auto")
        wait_for_qps(host, "still by policy", lambda rows: len(rows) == 2 and all(row["reason"] != "policy" for row in rows))
        need(client.process.poll() is None, f"it ended:\n{client.output()}")
    finally:
        host.freeflow("network", "set", "default", "--data-path", "auto")
        one.remove()
        two.remove()


def ping(host):
    one, two = host.pair()
    try:
        report = json.loads(host.freeflow("ping", "one", two.ip, "-c", "300", "-o", "json"))
        times = [report[name] for name in ("min_us", "quartile_1_us", "median_us", "quartile_3_us", "percentile_99_us", "max_us")]
        need(report["count"] == 300 and 0 < times[0] and times == sorted(times) and times[2] < 100_000, f"{report}")
        need([qp["name"] for qp in report["qps"]] == ["one", "two"], f"{report}")
        # Most find their way past the router; now and then one does not.
        need(all(way["path"] in ("direct", "partly") and way["direct_count"] > 150 for way in report["ways"]), f"{report}")
        text = host.freeflow("ping", "one", "two", "-s", "524288", "-c", "20")
        need("20 round trips of 524288 bytes" in text and "median" in text, text)
        need("path: one to two routed (message over 256 KiB), back routed (message over 256 KiB)" in text, text)
        host.freeflow("network", "set", "default", "--data-path", "routed")
        text = host.freeflow("ping", "one", "two", "-c", "1")
        need("routed (policy), back routed (policy)" in text, text)
        need("no running container" in host.freeflow("ping", "one", "three", codes=(1,)), "no reason is given")
        host.freeflow("ping", "one", "two", "-c", "0", codes=(2,))
        wait_for_qps(host, "QPs are left behind", lambda rows: rows == [])
        return f"median {report['median_us']:.1f} us"
    finally:
        host.freeflow("network", "set", "default", "--data-path", "auto")
        one.remove()
        two.remove()


def not_root(host):
    command = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", *host.command("up")]
    if not os.access(host.freeflow_path, os.X_OK) or not readable_by_all(host.freeflow_path):
        return "the program lies where others can't reach it"
    result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    lines = result.stderr.strip().splitlines()
    need(result.returncode not in (0, 101), f"exit code {result.returncode}")
    need(len(lines) == 1 and "root" in lines[0], f"not one line that says what is needed: {result.stderr}")
    return lines[0]


def readable_by_all(path):
    return all(part.stat().st_mode & 0o001 for part in path.parents)


def down_asks(host):
    container = host.container("alive")
    output = host.freeflow("down", codes=range(1, 128))
    need("alive" in output or "force" in output, output)
    need(container.exec("echo", "still here").strip() == "still here", "it took the container down")
    container.remove()


# ---- podman


def podman_devinfo(containers):
    output = harness.run(containers.unprivileged("ibv_devinfo", "-v"), seconds=60)
    need("freeflow0" in output and "PORT_ACTIVE" in output and "::ffff:" in output, output)


def podman_pair(containers):
    """Two of them, with an IP path between them by the CDI hook."""
    words = ["ib_send_bw", "-F", "-n", "200", "-s", "4096"]
    server = Running(containers.unprivileged("sh", "-c", f"ip -4 -o addr show scope global; exec stdbuf -oL {' '.join(words)}"))
    try:
        server.wait_for_output("Waiting for client", 60)
        address = next(line.split(" inet ")[1].split("/")[0] for line in server.output().splitlines() if " inet " in line)
        output = harness.run(containers.unprivileged(*words, address), seconds=60)
        need(server.wait(30) == 0 and "4096" in output, output + server.output())
    finally:
        server.kill()


def podman_leaves_nothing(host):
    end = time.monotonic() + 10
    while rows := host.containers():
        need(time.monotonic() < end, f"vNICs are left after podman's containers: {rows}")
        time.sleep(0.05)


@pytest.mark.parametrize("promise", [
    up_again, two_hosts, exit_codes, views, environment_and_volumes, signals_pass, lists_and_logs, status_and_doctor,
    data_path, qps_at_work, ping, not_root, down_asks])
def test_command(host, promise):
    promise(host)


@pytest.fixture(scope="module")
def containers():
    with podman.on_own_host() as containers:
        yield containers


def test_podman_ibv_devinfo_unprivileged(containers):
    podman_devinfo(containers)


def test_podman_ib_send_bw_between_two(containers):
    podman_pair(containers)


def test_podman_leaves_nothing(containers):
    containers.close()
    podman_leaves_nothing(containers.host)
