"""Metering: /metrics, `live` and `freeflow top` say what perftest did between two containers, by path; who may read them; the TCP port."""

import contextlib
import http.client
import json
import os
import pty
import signal
import socket
import time

import pytest

import harness
from harness import Host, api, need
from harness.api import BASE, Api, parse, scrape, value
from harness.api import groups as groups_of_users

SIZE = 65536
MESSAGES = 2000
LIMIT_BITS = 200_000_000
CLASS = f"""
apiVersion: freeflow.io/v1
kind: QosClass
metadata: {{name: slow}}
spec: {{vnic: {{rate: {LIMIT_BITS // 1_000_000}Mbit}}}}
---
apiVersion: freeflow.io/v1
kind: Network
metadata: {{name: shaped}}
spec: {{tenant: shaped, cidrs: [10.77.0.0/24], qosClass: slow}}
---
apiVersion: freeflow.io/v1
kind: QosClass
metadata: {{name: still}}
spec: {{vnic: {{rate: 1kbit}}}}
---
apiVersion: freeflow.io/v1
kind: Network
metadata: {{name: still}}
spec: {{tenant: shaped, cidrs: [10.78.0.0/24], qosClass: still}}
"""
NETWORKS = """
apiVersion: freeflow.io/v1
kind: Network
metadata: {name: brief}
spec: {tenant: brief, cidrs: [10.79.0.0/24]}
---
apiVersion: freeflow.io/v1
kind: Network
metadata: {name: shut}
spec: {tenant: shut, cidrs: [10.80.0.0/24], access: deny}
---
apiVersion: freeflow.io/v1
kind: Network
metadata: {name: quiet}
spec: {tenant: quiet, cidrs: [10.81.0.0/24], access: deny}
"""


def idle(api):
    return f"{len(scrape(api))} series"


def vnic_of(api, container):
    items = api.want(200, "GET", "/live")["items"]
    return next(item["vnic"] for item in items if item["title"] == container.name)


def counted(api, one, two, path):
    """perftest's traffic makes its counts grow, on that path and no other."""
    ids = {one.name: vnic_of(api, one), two.name: vnic_of(api, two)}
    before = scrape(api)
    words = ("ib_write_bw", "-F", "-s", SIZE, "-n", MESSAGES)
    harness.in_two_containers(one, two, words, (*words, "{ip}"))
    after = scrape(api)

    def grown(name, container, **labels):
        labels["vnic"] = ids[container.name]
        return value(after, name, **labels) - value(before, name, **labels)

    sent = grown("freeflow_vnic_sent_bytes_total", two, path=path)
    others = {other: grown("freeflow_vnic_sent_bytes_total", two, path=other) for other in {"direct", "routed", "wire"} - {path}}
    # The first messages go through the router, before a QP may pass it.
    need(sent + sum(others.values()) >= SIZE * MESSAGES, f"{sent} bytes on the path {path}, and {others}")
    need(others["wire"] == 0 and sum(others.values()) <= sent / 2, f"{sent} on the path {path}, but {others}")
    need(grown("freeflow_vnic_out_bytes_total", two) >= SIZE * MESSAGES, "too few bytes left")
    need(grown("freeflow_vnic_in_bytes_total", one) >= SIZE * MESSAGES, "too few bytes came")
    need(grown("freeflow_vnic_sent_messages_total", two) >= MESSAGES, "too few messages")
    need(all(after[key] >= count for key, count in before.items() if key[0].endswith("_total")), "a counter went back")


@contextlib.contextmanager
def traffic(one, two, seconds=120, settings=()):
    words = ("env", *settings, "ib_write_bw", "-F", "-s", SIZE, "-D", seconds)
    server = one.start(*words)
    one.wait_for_port(server)
    client = two.start(*words, one.ip)
    try:
        yield
    finally:
        client.kill()
        server.kill()
        one.kill_background()
        two.kill_background()
        for container in (one, two):
            container.exec("pkill", "-9", "ib_write_bw", codes=(0, 1))


def row_of(round_, container):
    return next(row for row in round_["vnics"] if row["title"] == container.name)


def rounds_of(host, container, is_wanted, *words):
    """Rounds of `top` until one is as wanted: traffic takes a moment to begin."""
    end = time.monotonic() + 30
    while True:
        rounds = [json.loads(line) for line in host.freeflow("top", "-n", "2", "-d", "0.5", "-o", "json", *words).splitlines()]
        need(len(rounds) == 2, f"{len(rounds)} rounds")
        row = row_of(rounds[-1], container)
        if is_wanted(row):
            return rounds[-1]
        need(time.monotonic() < end, f"never as wanted: {row}")


def rates(host, one, two, path):
    with traffic(one, two):
        round_ = rounds_of(host, two, lambda row: row["path"] == path and row["bitsPerSecondOut"] > 0, "--qps")
        row, other = row_of(round_, two), row_of(round_, one)
        need(row["messagesPerSecond"] > 0 and other["bitsPerSecondIn"] > 0, f"no rates: {row} {other}")
        qp = max(row["qps"], key=lambda qp: qp["bitsPerSecondOut"])
        need(qp["bitsPerSecondOut"] > 0 and qp["path"] == path, f"no rates of QPs: {row}")
        table = host.freeflow("top", "-n", "1", "-d", "0.3")
        need(path in table and two.name in table.splitlines()[1] + table.splitlines()[2], table)
        by_path(host, two, path)


def by_path(host, container, path):
    """Each queue pair counts once, on its path, with the reason that `ps --qps` gives."""
    api, name = Api(host), "freeflow_vnic_qps_by_path"
    vnic, reason, end = vnic_of(api, container), "policy" if path == "routed" else "", time.monotonic() + 20
    while True:
        samples = scrape(api)
        found = {tuple(dict(of)[label] for label in ("path", "reason")): count
                 for (of_name, of), count in samples.items() if of_name == name and ("vnic", vnic) in of and count}
        if found == {(path, reason): value(samples, "freeflow_vnic_qps", vnic=vnic)}:
            break
        need(time.monotonic() < end, f"not {path}: {found}")
    rows = [row for row in json.loads(host.freeflow("ps", "--qps", "-o", "json")) if row["id"] == vnic]
    need({(row["path"], row["reason"] or "") for row in rows} == {(path, reason)}, f"{rows}")


def slow_path(host, one, two):
    """Accesses by the slow path are counted, with the reason, for the vNIC whose memory it is and the queue pair whose request."""
    reason = "not shared when asked"
    with traffic(one, two, settings=("FREEFLOW_REMAP=off",)):
        row = row_of(rounds_of(host, two, lambda row: row["slowPath"]["reason"] == reason, "--qps"), two)
        need(row["slowPath"]["bitsPerSecond"] > 0 and row["slowPath"]["accessesPerSecond"] > 0, f"no rates: {row}")
        need(any(qp["slowPath"]["bitsPerSecond"] > 0 and qp["slowPath"]["reason"] == reason for qp in row["qps"]), f"no rates of QPs: {row}")
        samples = scrape(Api(host))
        for name in ("freeflow_vnic_slow_path_accesses_total", "freeflow_vnic_slow_path_bytes_total"):
            need(value(samples, name, vnic=row["vnic"], reason=reason) > 0, f"{name} is 0")
            need(value(samples, name, vnic=row["vnic"], reason="registered on demand") == 0, f"{name} has another reason")
        qps = [qp for qp in json.loads(host.freeflow("ps", "--qps", "-o", "json")) if qp["id"] == row["vnic"]]
        need(any(qp["slow_path_bytes"] > SIZE <= qp["slow_path_accesses"] * SIZE and qp["slow_path_reason"] == reason for qp in qps), f"{qps}")
        for words in (("ps", "--qps"), ("top", "-n", "1", "-d", "0.5")):
            table = host.freeflow(*words)
            need("SLOW PATH" in table and reason in table, table)


def limited(host):
    """A limit shows, and that it holds something back."""
    path = host.directory / "class.yaml"
    path.write_text(CLASS)
    host.freeflow("apply", "-f", path)
    one, two = (host.container(name, "--network", "shaped") for name in ("slow-one", "slow-two"))
    with traffic(one, two):
        row = row_of(rounds_of(host, two, lambda row: row["heldPercent"] > 0 and row["bitsPerSecondOut"] > 0), two)
        need(row["path"] == "routed" and row["limit"]["bitsPerSecond"] == LIMIT_BITS, f"no limit: {row}")
        samples = scrape(Api(host))
        need(value(samples, "freeflow_vnic_throttled_waits_total", vnic=row["vnic"]) > 0, "no waits")
        need(value(samples, "freeflow_vnic_metered", vnic=row["vnic"], tenant="shaped", network="shaped") == 1, "not metered")
    for container in (one, two):
        container.remove()


def held_back(host):
    """A wait longer than the time between two looks shows meanwhile."""
    one, two = (host.container(name, "--network", "still") for name in ("still-one", "still-two"))
    api = Api(host)
    with traffic(one, two):
        vnic = row_of(rounds_of(host, two, lambda row: row["heldPercent"] > 90 and row["bitsPerSecondOut"] == 0, "--qps"), two)["vnic"]
        first, second = (value(scrape(api), "freeflow_vnic_throttled_seconds_total", vnic=vnic) for _ in range(2))
        need(0 < first < second, f"{first} s held, and then {second} s")
    # Its queue pairs are gone, and nothing is taken back.
    left = value(scrape(api), "freeflow_vnic_throttled_seconds_total", vnic=vnic)
    need(left >= second, f"{left} s held, after {second} s")
    for container in (one, two):
        container.remove()


def totals(host):
    """Traffic of containers that no scrape saw counts for their network, as long as there is one."""
    api, path = Api(host), host.directory / "networks.yaml"
    path.write_text(NETWORKS)
    host.freeflow("apply", "-f", path)
    out = {"tenant": "brief", "network": "brief"}
    need(value(scrape(api), "freeflow_network_out_bytes_total", **out) == 0, "a new network has sent something")
    for _ in range(2):
        one, two = (host.container(name, "--network", "brief") for name in ("brief-one", "brief-two"))
        words = ("ib_write_bw", "-F", "-s", SIZE, "-n", MESSAGES)
        harness.in_two_containers(one, two, words, (*words, "{ip}"))
        ids = {vnic_of(api, container) for container in (one, two)}
        one.remove()
        two.remove()
    samples = scrape(api)
    need(not any(("vnic", vnic) in labels for vnic in ids for _, labels in samples), "a vNIC is not gone")
    for name in ("freeflow_network_out_bytes_total", "freeflow_network_in_bytes_total", "freeflow_network_sent_bytes_total"):
        need(value(samples, name, **out) >= 2 * SIZE * MESSAGES, f"{name}: {value(samples, name, **out)}")
    need(value(samples, "freeflow_network_sent_messages_total", **out) >= 2 * MESSAGES, "too few messages")
    need(value(samples, "freeflow_network_sent_bytes_total", path="wire", **out) == 0, "something went to another host")
    host.freeflow("delete", "network", "brief")
    need(not any(("network", "brief") in labels for _, labels in scrape(api)), "lines of a network that is gone")


def refused(host):
    """Refusals by a network's own access, and attempts on others, count for that network and no other."""
    api = Api(host)
    one, two = (host.container(name, "--network", "shut") for name in ("shut-one", "shut-two"))
    other = host.container("elsewhere", "--network", "quiet")
    need(value(scrape(api), "freeflow_vnic_info", vnic=vnic_of(api, one), container=one.name, tenant="shut", network="shut") == 1, "no container")
    for address in (two.ip, other.ip):
        one.exec("rping", "-c", "-a", address, "-C", "1", codes=(1, 255))

    def counts(samples, network):
        of = {"tenant": network, "network": network}
        need(value(samples, "freeflow_policy_disconnections_total", rule="", **of) == 0, f"{network}: something was cut")
        tried = value(samples, "freeflow_policy_violations_total", what="rdma_cm request to nobody", **of)
        return value(samples, "freeflow_policy_refusals_total", rule="", **of), tried

    end = time.monotonic() + 30
    while 0 in counts(samples := scrape(api), "shut"):
        need(time.monotonic() < end, f"not counted: {counts(samples, 'shut')}")
        time.sleep(0.05)
    need(counts(samples, "quiet") == (0, 0), f"another network's: {counts(samples, 'quiet')}")
    for container in (one, two, other):
        container.remove()


def on_a_terminal(host):
    """It redraws, ends on q, and leaves the terminal as it was."""
    for key in (b"q", b"\x03"):
        pid, terminal = pty.fork()
        if pid == 0:
            command = host.command("top", "-d", "0.2")
            os.execv(command[0], command)
        output, end, is_asked = b"", time.monotonic() + 20, False
        try:
            while time.monotonic() < end:
                try:
                    part = os.read(terminal, 65536)
                except OSError:
                    break
                if not part:
                    break
                output += part
                if not is_asked and output.count(b"MSG/S") >= 2:
                    is_asked = True
                    os.write(terminal, key)
            need(is_asked and output.endswith(b"\x1b[?25h\x1b[?1049l"), f"the terminal is not as it was: {output[-300:]!r}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            os.close(terminal)
        need(os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0, f"status {status}")


def pages(api):
    """Odd pages are refused, good ones go on where they should."""
    for bad in ("continue=x:y", "continue=..", "qps=yes", "page=1"):
        api.want(400, "GET", f"/live?{bad}")
    every = [item["vnic"] for item in api.want(200, "GET", "/live?qps=true")["items"]]
    need(every == sorted(every) and len(every) == 2, f"not in order: {every}")
    rest = api.want(200, "GET", f"/live?continue={every[0]}")["items"]
    need([item["vnic"] for item in rest] == every[1:], "a page does not go on")
    api.want(200, "GET", "/live?qps=true&continue=zzz:77")


def readers(host):
    """A viewer reads all; a tenant's admin its own vNICs, and no metrics; others nothing."""
    code = ("import http.client, socket, sys\n"
            "connection = http.client.HTTPConnection('freeflow')\n"
            "connection.sock = socket.socket(socket.AF_UNIX)\n"
            f"connection.sock.connect({str(host.run_dir / 'api.sock')!r})\n"
            "connection.request('GET', sys.argv[1])\n"
            "response = connection.getresponse()\n"
            "print(response.status, response.read().decode()[:200])\n")

    def ask(groups, path):
        words = ["setpriv", "--reuid", "65534", "--regid", "65534", *(["--groups", ",".join(groups)] if groups else ["--clear-groups"])]
        return harness.run([*words, "--", "python3", "-c", code, path])

    host.directory.chmod(0o711)
    names = ("freeflow-viewer", "freeflow-tenant-default", "freeflow-tenant-nobody")
    with groups_of_users(names) as numbers:
        viewer, tenant, other = ([str(numbers[name])] for name in names)
        need(ask(viewer, "/metrics").startswith("200 # HELP"), "a viewer reads no metrics")
        need(ask(tenant, "/metrics").startswith("403"), "a tenant reads all metrics")
        for groups in (viewer, tenant):
            need('"items":[{' in ask(groups, f"{BASE}/live"), "not what is theirs")
        need('"items":[]' in ask(other, f"{BASE}/live"), "a tenant sees what is another's")
        for path in ("/metrics", f"{BASE}/live"):
            need(ask([], path).startswith("403"), f"anybody reads {path}")


def by_tcp():
    """Off by default; then only three paths, which nobody can change anything by; a flood harms only itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with Host("--metrics-listen", f"127.0.0.1:{port}") as host:
        def ask(method, path, accept="*/*"):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            with contextlib.closing(connection):
                connection.request(method, path, "{}" if method == "PUT" else None, {"Accept": accept})
                response = connection.getresponse()
                if path == "/metrics" and response.status == 200:
                    # There is one format, whatever is asked for, and it says which.
                    need(response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8", str(response.headers))
                return response.status, response.read().decode()

        code, text = ask("GET", "/metrics")
        need(code == 200 and value(parse(text), "freeflow_router_vnics") == 0, f"{code}: {text[:200]}")
        code, text = ask("GET", "/metrics", "application/openmetrics-text;version=1.0.0")
        need(code == 200 and parse(text), f"OpenMetrics: {code}: {text[:200]}")
        need(ask("GET", "/livez") == (200, "ok\n") and ask("GET", "/readyz") == (200, "ok\n"), "no health")
        for method, path in [("GET", BASE + "/networks"), ("GET", BASE + "/live"), ("GET", "/openapi/v3")]:
            need(ask(method, path)[0] == 404, f"{path} is served")
        for method in ("PUT", "DELETE", "POST"):
            need(ask(method, "/metrics")[0] == 405 and ask(method, BASE + "/networks/default")[0] == 404, f"{method} does something")
        with contextlib.ExitStack() as stack:
            for _ in range(64):
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            # A client that says nothing is cut off; meanwhile the API goes on.
            Api(host).want(200, "GET", "/metrics", base="")
        need(ask("GET", "/livez")[0] == 200, "it does not come back")
        host.freeflow("up")
        need("metrics" in host.freeflow("up", "--metrics-listen", "off", codes=(1,)), "another address is not refused")


@pytest.fixture(scope="module")
def api(host):
    """Of the host as long as it is idle."""
    harness.require_commands("ib_write_bw", "groupadd", "groupdel", "getent", "setpriv")
    return Api(host)


@pytest.fixture
def path(request, host):
    host.freeflow("network", "set", "default", "--data-path", "routed" if request.param == "routed" else "auto")
    return request.param


def test_idle_host(api):
    idle(api)


@pytest.mark.parametrize("path", ["direct", "routed"], indirect=True)
def test_traffic_is_counted(api, server, client, path):
    counted(api, server, client, path)


@pytest.mark.parametrize("path", ["direct", "routed"], indirect=True)
def test_rates(host, server, client, path):
    rates(host, server, client, path)


def test_slow_path(host, server, client):
    host.freeflow("network", "set", "default", "--data-path", "auto")
    slow_path(host, server, client)


def test_on_a_terminal(host, pair):
    on_a_terminal(host)


def test_pages(api, pair):
    pages(api)


def test_readers(host, pair):
    readers(host)


def test_limited(host, pair):
    limited(host)


def test_held(host, pair):
    held_back(host)


def test_totals_by_network(host, pair):
    totals(host)


def test_refused(host, pair):
    refused(host)


def test_by_tcp():
    by_tcp()
