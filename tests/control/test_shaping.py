"""QoS classes and quotas that come, change and go while programs run, and the mode of a host.

How fast a machine is does not matter here: a limit of a few messages a second is far below what any can do, and messages
are counted over the sender's own time. (Exact accounting by itself has its tests in the crates.)
"""

import json
import re
import time

import pytest

import harness
from harness import PORT, need
from harness.cm import wait_until

RATE, BURST = 5, 3
METERED = "limited by a QoS class"
NETWORK = """
apiVersion: freeflow.io/v1
kind: Network
metadata: {name: red}
spec: {tenant: red, cidrs: [10.50.0.0/24]%s}
"""
OBJECT = """
apiVersion: freeflow.io/v1
kind: %s
metadata: {name: small}
spec: {%s}
---"""
# Limits in force when `apply` ends may have let pass messages that are counted a little later.
SETTLE_S = 1
COUNTED_S = 3


def apply(host, text):
    path = host.directory / "objects.yaml"
    path.write_text(text)
    return host.freeflow("apply", "-f", path)


def plain(host):
    """The network without a class and without a quota."""
    apply(host, NETWORK % "")


def qos(spec):
    """The network has this class from now on."""
    return OBJECT % ("QosClass", spec) + NETWORK % ", qosClass: small"


def quota(spec):
    return OBJECT % ("Quota", spec) + NETWORK % ", quota: small"


def get(host, *words):
    return json.loads(host.freeflow("get", *words, "-o", "json"))


def conditions(host, title):
    vnics = get(host, "vnics")["items"]
    return next(vnic["status"]["conditions"] for vnic in vnics if vnic["status"]["title"] == title)


def wait_for_refusal(host, title, ran_out, count=1, seconds=20):
    """It is in the audit log that a quota refused a container's program something, what, and how often."""
    name = next(vnic["metadata"]["name"] for vnic in get(host, "vnics")["items"] if vnic["status"]["title"] == title)
    wanted = {"event": "enforced", "what": "quota refused", "vnic": name, "tenant": "red", "rule": "Quota small", "ranOut": ran_out}

    def lines():
        return [json.loads(line) for line in (host.run_dir / "audit.log").read_text().splitlines()]

    wait_until(lambda: sum(line["count"] for line in lines() if wanted.items() <= line.items()) >= count,
               lambda: f"{count} of {wanted} are not in the audit log: {lines()[-5:]}", seconds)
    need("quota refused" in (host.run_dir / "router.log").read_text(), "nor in router.log")


# ---- rates


def reported(running):
    """(count, milliseconds) of each line."""
    return [(int(count), int(ms)) for count, ms in re.findall(r"sent (\d+) in (\d+) ms", running.output())]


def progress(running, seconds):
    """How many messages in how many seconds of its own, from now on."""
    before = len(reported(running))
    time.sleep(seconds)
    need(running.process.poll() is None, f"the sender ended:\n{running.output()[-1000:]}")
    wait_until(lambda: len(reported(running)) >= before + 2, "no message passes", 20)
    lines = reported(running)[max(0, before - 1):]
    return lines[-1][0] - lines[0][0], (lines[-1][1] - lines[0][1]) / 1000


def need_held(running, rate=RATE, burst=BURST):
    time.sleep(SETTLE_S)
    count, seconds = progress(running, COUNTED_S)
    need(0 < count <= burst + rate * seconds + 1, f"{count} messages in {seconds} s at {rate}/s and a burst of {burst}")
    return f"{count} in {seconds:.1f} s"


def need_free(running):
    """More than the limit had allowed, however slow the machine is."""
    end = time.monotonic() + 20
    first = reported(running)[-1] if reported(running) else (0, 0)
    while True:
        count, ms = reported(running)[-1] if reported(running) else (0, 0)
        if count - first[0] > BURST + 50 * RATE * (1 + (ms - first[1]) / 1000):
            return
        need(time.monotonic() < end, f"still held: {count - first[0]} messages in {ms - first[1]} ms")
        time.sleep(0.1)


def limit(whose, rate=RATE, burst=BURST):
    return qos(f"{whose}: {{messageRate: {rate}, messageBurst: {burst}}}")


def rate_of(host, whose):
    """Comes, changes, goes, with a sender that runs."""
    plain(host)
    one = host.container("one", "--network", "red")
    try:
        sender = one.start(harness.program("tenants"), "pump")
        sender.wait_for_output("sent")
        need_free(sender)
        apply(host, limit(whose))
        note = need_held(sender)
        apply(host, limit(whose, 4 * RATE, 1))
        faster = need_held(sender, 4 * RATE, 1)
        if whose == "vnic":
            in_conditions = "\n".join(conditions(host, "one"))
            need("small" in in_conditions, f"the class is not in the conditions: {in_conditions}")
            need("held back" in in_conditions, f"no condition about what was held back: {in_conditions}")
        plain(host)
        need_free(sender)
        return f"{note}, then {faster}"
    finally:
        one.remove()


def from_the_beginning(host):
    """A vNIC that comes when the class is there already has its burst, and no more."""
    apply(host, limit("vnic"))
    one = host.container("one", "--network", "red")
    try:
        sender = one.start(harness.program("tenants"), "pump")
        wait_until(lambda: reported(sender) and reported(sender)[-1][0] >= BURST + 2, "nothing passes", 30)
        count, ms = reported(sender)[-1]
        need(count <= BURST + RATE * ms / 1000 + 1, f"{count} messages in {ms} ms")
        return f"{count} in {ms} ms"
    finally:
        one.remove()
        plain(host)


def qps_of(host):
    return [row for row in json.loads(host.freeflow("ps", "--qps", "-o", "json")) if row["state"] == "RTS"]


def direct_path(host):
    """A metered QP has no direct path; it comes back when the class goes."""
    if harness.paths.wanted() != "auto":
        return "not on this data path"
    plain(host)
    one, two = (host.container(name, "--network", "red") for name in ("one", "two"))
    load = harness.program("load")
    try:
        server = one.start(load, "server", PORT)
        one.wait_for_port(server)
        client = two.start(load, "-e", "client", one.ip, PORT)
        server.wait_for_output("ready")
        wait_until(lambda: any(row["path"] == "direct" for row in qps_of(host)), lambda: f"never direct: {qps_of(host)}", 20)
        apply(host, qos("vnic: {rate: 1Gbit}"))
        wait_until(lambda: {(row["path"], row["reason"]) for row in qps_of(host)} == {("routed", METERED)},
                   lambda: f"metered, and not all routed: {qps_of(host)}", 20)
        plain(host)
        wait_until(lambda: any(row["path"] == "direct" for row in qps_of(host)), lambda: f"not direct again: {qps_of(host)}", 20)
        client.terminate()
        for side in (client, server):
            code = side.wait(30)
            need(code == 0 and "all right" in side.output(), f"it was disturbed ({code}):\n{side.output()}")
    finally:
        one.remove()
        two.remove()


# ---- quotas


def quota_of_a_vnic(host):
    apply(host, quota("perVnic: {qps: 5}"))
    one = host.container("one", "--network", "red")
    try:
        maker = one.start(harness.program("tenants"), "qps", 8)
        maker.wait_for_output("made 5, then: ENOMEM")
        # The reason is in the conditions.
        text = "\n".join(conditions(host, "one"))
        need("ENOMEM: more QPs than the vNIC's" in text and "small" in text, text)
        wait_for_refusal(host, "one", "perVnic.qps")
        name = get(host, "vnics")["items"][0]["metadata"]["name"]
        need("ENOMEM" in host.freeflow("describe", "vnic", name), "describe does not say why")
        need(get(host, "quota", "small")["status"]["refusalCount"] > 0, "the quota counts no refusal")
        apply(host, quota("perVnic: {qps: 7}"))
        maker.wait_for_output("made 7, then: ENOMEM")
        # Existing objects stay when it shrinks.
        apply(host, quota("perVnic: {qps: 2}"))
        wait_until(lambda: get(host, "vnics")["items"][0]["status"]["qpCount"] == 7, "what was held is gone")
        refused = get(host, "quota", "small")["status"]["refusalCount"]
        plain(host)
        maker.wait_for_output("made all")
        # Also what is summed up when the quota has gone.
        wait_for_refusal(host, "one", "perVnic.qps", refused, 40)
        maker.terminate()
    finally:
        one.remove()
        plain(host)


def quota_of_a_network(host):
    """All vNICs of a network together; another network is not asked."""
    apply(host, quota("perNetwork: {qps: 4}"))
    one, two = (host.container(name, "--network", "red") for name in ("one", "two"))
    other = host.container("other")
    program = harness.program("tenants")
    try:
        first = one.start(program, "qps", 3)
        first.wait_for_output("made all")
        second = two.start(program, "qps", 2)
        second.wait_for_output("made 1, then: ENOMEM")
        text = "\n".join(conditions(host, "two"))
        need("than the network's" in text, text)
        wait_for_refusal(host, "two", "perNetwork.qps")
        other.start(program, "qps", 8).wait_for_output("made all")
        # Room that one lets go, the other gets.
        first.kill()
        second.wait_for_output("made all")
    finally:
        for container in (one, two, other):
            container.remove()
        plain(host)


def quota_of_memory(host):
    """Registered bytes and regions, by a program that knows of no quota."""
    apply(host, quota("perVnic: {registeredBytes: 1MiB}"))
    one = host.container("one", "--network", "red")
    try:
        output = one.exec("ibv_rc_pingpong", "-g", "0", "-s", str(8 << 20), codes=(1,))
        need("register MR" in output, output)
        text = "\n".join(conditions(host, "one"))
        need("registered bytes" in text, text)
        wait_for_refusal(host, "one", "perVnic.registeredBytes")
    finally:
        one.remove()
        plain(host)


def quota_of_vnics(host):
    apply(host, quota("vnics: 1"))
    one = host.container("one", "--network", "red")
    try:
        output = host.freeflow("run", "--network", "red", "--rm", "--", "true", codes=(125,))
        need("small" in output or "quota" in output.lower(), f"not the reason: {output}")
        apply(host, quota("vnics: 2"))
        host.freeflow("run", "--network", "red", "--rm", "--", "true")
    finally:
        one.remove()
        plain(host)
    return output.strip()[-120:]


# ---- the host's mode


def mode(host):
    name = get(host, "hosts")["items"][0]["metadata"]["name"]

    def status():
        return get(host, "host", name)["status"]

    def apply_mode(mode):
        apply(host, f"apiVersion: freeflow.io/v1\nkind: Host\nmetadata: {{name: {name}}}\nspec: {{mode: {mode}}}\n")

    apply_mode("lowcpu")
    need(status()["mode"] == "lowcpu" and status()["reason"] == "asked for", status())
    apply_mode("auto")
    need(status()["mode"] == "adaptive", status())
    one = host.container("one", "--label", "freeflow.io/latency-class=background")
    try:
        need(status()["mode"] == "lowcpu" and "background" in status()["reason"], status())
        two = host.container("two", "--label", "freeflow.io/latency-class=low")
        try:
            # A machine of few processors has none to give away.
            need(status()["mode"] in ("fastpath", "adaptive") and status()["latencyClass"] == "low", status())
            reason = status()["reason"]
            need("latency class low" in reason and reason in host.freeflow("describe", "host"), reason)
        finally:
            two.remove()
        need(status()["mode"] == "lowcpu", status())
        # One that is only declared takes nothing from anybody, until a container has it.
        apply(host, "apiVersion: freeflow.io/v1\nkind: Vnic\nmetadata: {name: fast, labels: {freeflow.io/latency-class: low}}\n"
                    "spec: {network: default}\n")
        need(status()["mode"] == "lowcpu" and status()["latencyClass"] == "background", status())
        fast = host.container("fast", "--vnic", "fast")
        try:
            need(status()["mode"] in ("fastpath", "adaptive") and status()["latencyClass"] == "low", status())
            harness.end_router(host)
            host.up()
            need(status()["latencyClass"] == "low", f"forgotten with the router: {status()}")
        finally:
            fast.remove()
        need(status()["mode"] == "lowcpu" and status()["latencyClass"] == "background", status())
    finally:
        one.remove()
        host.freeflow("delete", "vnic", "fast", "--ignore-not-found")
        apply_mode("adaptive")
    return reason


@pytest.mark.parametrize("whose", ["qp", "vnic", "tenant"])
def test_messages_a_second(host, whose):
    rate_of(host, whose)


@pytest.mark.parametrize("promise", [from_the_beginning, direct_path, quota_of_a_vnic, quota_of_a_network,
                                     quota_of_memory, quota_of_vnics, mode])
def test_shaping(host, promise):
    promise(host)
