"""The REST server of the control plane: every verb, dry runs, watches, conflicts; each role; the audit log; hostile clients."""

import contextlib
import http.client
import json
import os
import resource
import select
import socket
import sys
import time

import pytest

import harness
from harness import Failure, api, need
from harness.api import BASE, GROUPS, UID, Api, groups
from harness.settings import ROOT
from harness.users import as_user, reachable

SLICE, SLICES = 128, 3  # objects that the control thread gives at a time
CONNECTIONS = 10_000
KNOCKS = 400
DESCRIPTORS_MAX = 300  # more than the server holds at a time


def named(kind, name, spec, **metadata):
    return {"apiVersion": "freeflow.io/v1", "kind": kind, "metadata": {"name": name, **metadata}, "spec": spec}


def quota(name, vnics, **metadata):
    return named("Quota", name, {"vnics": vnics}, **metadata)


def group(name, tenant="default", **metadata):
    return named("Group", name, {"tenant": tenant, "members": []}, **metadata)


# ---- verbs


def every_verb(api):
    answer = api.want(201, "PUT", "/quotas/q", quota("q", 5))
    version = answer["metadata"]["resourceVersion"]
    need(answer["spec"]["vnics"] == 5 and answer["metadata"]["generation"] == 1, str(answer))
    again = api.want(200, "PUT", "/quotas/q", quota("q", 5))
    need(again["metadata"]["resourceVersion"] == version, f"nothing has changed: {again}")
    # The path says the rest.
    changed = api.want(200, "PUT", "/quotas/q", {"spec": {"vnics": 6}})
    need(changed["metadata"]["resourceVersion"] > version and changed["metadata"]["generation"] == 2, str(changed))
    need(api.want(200, "GET", "/quotas/q")["spec"] == changed["spec"], "what is read is not what was written")
    listed = api.want(200, "GET", "/quotas")
    need(listed["kind"] == "QuotaList" and listed["metadata"]["resourceVersion"] >= version, str(listed))
    need([item["metadata"]["name"] for item in listed["items"]] == ["q"], str(listed))
    gone = api.want(200, "DELETE", "/quotas/q")
    need(gone["items"][0]["result"] == "deleted", str(gone))
    api.want(404, "GET", "/quotas/q")
    api.want(404, "DELETE", "/quotas/q")
    for kind in ("networks", "groups", "accessrules", "qosclasses", "quotas", "vnics", "hosts"):
        api.want(200, "GET", f"/{kind}")
    need(api.names("networks") == ["default"] and len(api.names("hosts")) == 1, "what is there from the start")


def dry_runs(api):
    api.want(201, "PUT", "/quotas/d?dryRun=true", quota("d", 1))
    items = {"items": [quota("d", 1), quota("e", 1)]}
    planned = api.want(200, "POST", "/apply?dryRun=true", items)
    need([item["result"] for item in planned["items"]] == ["created", "created"], str(planned))
    need(api.names("quotas") == [], "a dry run has changed something")
    api.want(200, "POST", "/apply", items)
    api.want(200, "DELETE", "/quotas/d?dryRun=true")
    need(api.names("quotas") == ["d", "e"], "a dry run has changed something")
    for name in "de":
        api.want(200, "DELETE", f"/quotas/{name}")


def applies(api):
    items = [named("QosClass", "slow", {"vnic": {"rate": "1Gbit"}}), quota("a", 1), quota("b", 2, labels={"tier": "web"})]
    first = api.want(200, "POST", "/apply", {"items": items})
    need([item["result"] for item in first["items"]] == ["created"] * 3, str(first))
    items[1]["spec"]["vnics"] = 7
    second = api.want(200, "POST", "/apply", {"items": items})
    need([item["result"] for item in second["items"]] == ["unchanged", "configured", "unchanged"], str(second))
    need(second["items"][1]["object"]["spec"]["vnics"] == 7, str(second))
    # All or none.
    refused = api.want(422, "POST", "/apply", {"items": [quota("c", 1), named("QosClass", "bad", {"weight": 0})]})
    need(refused["details"]["causes"][0]["field"] == "spec.weight" and refused["details"]["name"] == "bad", str(refused))
    need(api.names("quotas") == ["a", "b"], "a part of a refused apply was done")
    need(api.names("quotas", "?labelSelector=tier%3Dweb") == ["b"], "selected")
    need(api.names("quotas", "?labelSelector=!tier") == ["a"], "selected")
    for path in ("quotas/a", "quotas/b", "qosclasses/slow"):
        api.want(200, "DELETE", f"/{path}")


def refusals(api):
    def field(code, method, path, body):
        answer = api.want(code, method, path, body)
        return answer["details"]["causes"][0]["field"]

    need(field(422, "PUT", "/quotas/x", quota("y", 1)) == "metadata.name", "another name")
    need(field(422, "PUT", "/quotas/x", group("x")) == "kind", "another kind")
    need(field(422, "PUT", "/quotas/x", named("Quota", "x", {"nics": 1})) == "spec.nics", "an unknown field")
    bad = api.want(422, "POST", "/apply", {"items": [quota("x", 1), named("Quota", "y", {"vnics": "many"})]})
    need(bad["details"]["index"] == 1 and bad["details"]["name"] == "y", str(bad))
    api.want(422, "PUT", "/quotas/x", "[]")
    for body in ("", "{", "nonsense", b"\xff\xfe"):
        api.want(400, "PUT", "/quotas/x", body)
    api.want(400, "POST", "/apply", {"objects": []})
    # A dry run that is asked for in the wrong place is none, and must not be done.
    need(field(422, "POST", "/apply", {"items": [quota("z", 1)], "dryRun": True}) == "dryRun", "an unknown field of a list")
    need(api.names("quotas") == [], "it was done nevertheless")
    listed = {"apiVersion": "freeflow.io/v1", "kind": "List", "metadata": {}, "items": [quota("z", 1)]}
    api.want(200, "POST", "/apply?dryRun=true", listed)
    api.want(400, "PUT", "/quotas/x?dryrun=true", quota("x", 1))
    api.want(400, "PUT", "/quotas/x?dryRun=yes", quota("x", 1))
    api.want(400, "GET", "/quotas?labelSelector=%zz")
    for path in ("/%ff", "/quotas/%ff", "/hosts/%ff/router"):
        need(api.want(400, "GET", path)["message"] == "the path is not well-formed", path)
    answer = api.want(400, "GET", "/quotas?labelSelector=tier%20in%20(web)")
    need('"tier in (web)"' in answer["message"], str(answer))
    api.want(400, "GET", "/quotas?watch=true&labelSelector=%3D,")
    api.want(404, "GET", "/nothing")
    api.want(404, "GET", "/nothing", base="")
    api.want(405, "POST", "/quotas", quota("x", 1))
    api.want(405, "PATCH", "/quotas/x", quota("x", 1))
    api.want(201, "PUT", "/quotas/x", quota("x", 1))
    # A reader that has read an older one than there is.
    version = api.want(200, "GET", "/quotas/x")["metadata"]["resourceVersion"]
    api.want(200, "PUT", "/quotas/x", quota("x", 2, resourceVersion=version))
    answer = api.want(409, "PUT", "/quotas/x", quota("x", 3, resourceVersion=version))
    need(answer["reason"] == "Conflict", str(answer))
    need(api.want(200, "GET", "/quotas/x")["spec"]["vnics"] == 2, "a conflict has changed something")
    api.want(200, "DELETE", "/quotas/x")
    items = [named("Network", "used", {"cidrs": ["10.76.0.0/24"]}), named("Group", "user", {"members": [{"networks": ["used"]}]})]
    api.want(200, "POST", "/apply", {"items": items})
    answer = api.want(409, "DELETE", "/networks/used")
    need(answer["reason"] == "InUse" and "users" not in answer["details"], str(answer))
    answer = api.want(409, "DELETE", "/networks/used?dryRun=true")
    need(answer["details"]["users"] == ["Group user"], str(answer))
    api.want(200, "DELETE", "/groups/user")
    api.want(200, "DELETE", "/networks/used")
    host = api.names("hosts")[0]
    for path in ("/networks/default", f"/hosts/{host}"):
        answer = api.want(409, "DELETE", path)
        need(answer["reason"] == "Conflict" and "can't be deleted" in answer["message"], str(answer))


def many_objects(api):
    """Lists come whole and in order, however many slices the server makes of them; so do their labels' choices."""
    wanted = [f"many-{number:04}" for number in range(SLICES * SLICE + 7)]
    # Backwards: the order is the server's.
    items = [group(name, labels={"third": str(int(name[-4:]) % 3)}) for name in reversed(wanted)]
    for at in range(0, len(items), SLICE):
        api.want(200, "POST", "/apply", {"items": items[at:at + SLICE]})
    need(api.names("groups") == wanted, "the list is not whole, or not in order")
    need(api.names("groups", "?labelSelector=third%3D1") == wanted[1::3], "the choice of labels is not whole")
    need(api.names("groups", "?labelSelector=third%3D5") == [], "nothing is something")
    # An object changed while the list is read is there once, before or after.
    for name in wanted:
        api.want(200, "DELETE", f"/groups/{name}")
    need(api.names("groups") == [], "not all is gone")


def many_live(api):
    """`live` goes page by page: each vNIC once, in order, and what comes or goes meanwhile makes nobody else be left out."""
    wanted = [f"live-{number:03}" for number in range(2 * SLICE + 9)]
    for at in range(0, len(wanted), SLICE):
        vnics = [named("Vnic", name, {"network": "default"}) for name in wanted[at:at + SLICE]]
        api.want(200, "POST", "/apply", {"items": vnics})
    seen, after, pages = [], "", 0
    while True:
        page = api.want(200, "GET", f"/live?continue={after}" if after else "/live")
        seen += [item["vnic"] for item in page["items"] if item["vnic"] in wanted]
        after, pages = page["metadata"]["continue"], pages + 1
        if pages == 1:
            need(after, "all on one page")
            # The one that the next page begins behind, too.
            for name in (after, wanted[-1]):
                api.want(200, "DELETE", f"/vnics/{name}")
        if not after:
            break
    need(pages >= 3 and seen == wanted[:-1], f"{pages} pages, {len(seen)} vNICs of {len(wanted) - 1}")
    for name in wanted:
        api.ask("DELETE", f"/vnics/{name}")


def all_or_nothing(host, api):
    """Answers are true: no vNIC is refused after its object was taken, and one that can't be made takes all others along."""
    edges = {"first": "1.0.0.0/8", "last": "223.255.255.248/29", "shared": "100.64.0.0/10"}
    items = []
    for name, cidr in edges.items():
        items += [named("Network", name, {"tenant": name, "cidrs": [cidr]}), named("Vnic", f"at-{name}", {"network": name})]
    api.want(200, "POST", "/apply", {"items": items})
    for cidr in ("0.0.0.0/8", "127.0.0.0/8", "224.0.0.0/8", "240.0.0.0/8"):
        api.want(422, "PUT", "/networks/no", {"spec": {"tenant": "no", "cidrs": [cidr]}})
    # The router is done with them when the next answer of this vNIC's kind comes.
    for name in edges:
        need(api.want(200, "GET", f"/vnics/at-{name}")["status"], "no status")
        need((host.run_dir / "vnics" / f"at-{name}" / "router.sock").is_socket(), "no socket")
    (host.run_dir / "vnics" / "blocked").write_text("in the way")
    names = ("a", "blocked", "c")
    refused = api.want(500, "POST", "/apply", {"items": [named("Vnic", name, {"network": "first"}) for name in names]})
    need("blocked" in refused["message"] or refused["details"].get("name") == "blocked", str(refused))
    for name in names:
        api.want(404, "GET", f"/vnics/{name}")
    need(not (host.run_dir / "vnics" / "a").exists() and not (host.run_dir / "vnics" / "c").exists(), "directories are left")
    (host.run_dir / "vnics" / "blocked").unlink(missing_ok=True)
    api.want(200, "POST", "/apply", {"items": [named("Vnic", name, {"network": "first"}) for name in names]})
    for name in (*names, *(f"at-{name}" for name in edges)):
        api.want(200, "DELETE", f"/vnics/{name}")
    for name in edges:
        api.want(200, "DELETE", f"/networks/{name}")


def refusals_are_bounded(api):
    """Of many mistakes some are named, and how many more there are."""
    members = [{"networks": ["-bad"] * 64, "cidrs": ["bad"] * 64} for _ in range(16)]
    refused = api.want(422, "PUT", "/groups/bad", {"spec": {"tenant": "default", "members": members}})
    causes = refused["details"]["causes"]
    last = causes[-1]["message"].split()
    need(len(causes) == 17 and (last[0], last[2]) == ("and", "more") and int(last[1]) >= 16 * 128 - 16, str(causes)[-500:])
    need(len(json.dumps(refused)) < 16_384, f"{len(json.dumps(refused))} bytes")


def watches(api):
    api.want(201, "PUT", "/groups/old", group("old", labels={"tier": "web"}))
    version = api.want(200, "GET", "/groups")["metadata"]["resourceVersion"]
    selected = "/groups?watch=true&labelSelector=tier%3Dweb"
    with (api.watch("/groups?watch=true") as every, api.watch(selected) as some,
          api.watch(f"/groups?watch=true&resourceVersion={version}") as later,
          api.watch(f"/groups/one?watch=true&resourceVersion={version}") as one):
        every.expect("ADDED old")
        some.expect("ADDED old")
        api.want(201, "PUT", "/groups/one", group("one"))
        api.want(200, "PUT", "/groups/one", group("one", labels={"tier": "web"}))
        api.want(200, "PUT", "/groups/old", group("old"))
        api.want(201, "PUT", "/quotas/other", quota("other", 1))
        api.want(200, "DELETE", "/groups/one")
        for watch in (every, later):
            watch.expect("ADDED one", "MODIFIED one", "MODIFIED old", "DELETED one")
        some.expect("ADDED one", "DELETED old", "DELETED one")
        one.expect("ADDED one", "MODIFIED one", "DELETED one")
    # From in between, and from where all is sent.
    with api.watch(f"/groups?watch=true&resourceVersion={version + 2}") as watch:
        watch.expect("MODIFIED old", "DELETED one")
    with api.watch("/groups?watch=true") as watch:
        watch.expect("ADDED old")
        need(watch.event()["type"] == "BOOKMARK", "where may a reader go on from?")
        api.want(200, "POST", "/apply", {"items": [group("one"), group("two")]})
        reported = [watch.event() for _ in range(3)]
        need([event["type"] for event in reported] == ["ADDED", "ADDED", "BOOKMARK"], f"{reported}")
        api.want(200, "DELETE", "/groups/two")
        api.want(200, "DELETE", "/groups/one")
    version = reported[-1]["object"]["metadata"]["resourceVersion"]
    with api.watch(f"/groups?watch=true&resourceVersion={version}") as watch:
        watch.expect("DELETED two", "DELETED one")
    api.want(410, "GET", "/groups?watch=true&resourceVersion=999999999")
    for path in ("groups/old", "quotas/other"):
        api.want(200, "DELETE", f"/{path}")


def expiry(api):
    version = api.want(200, "GET", "/groups")["metadata"]["resourceVersion"]
    slow = api.watch(f"/groups?watch=true&resourceVersion={version}")
    for generation in "abcd":
        labels = {f"l{number}": generation * 60 for number in range(60)}
        api.want(200, "POST", "/apply", {"items": [group(f"g{number}", labels=labels) for number in range(900)]})
    api.want(410, "GET", f"/groups?watch=true&resourceVersion={version}")
    # Bytes that the kernel and the server had taken come, then the end; a slow machine cuts it off meanwhile.
    with slow:
        try:
            while (event := slow.event()) and event["type"] != "ERROR":
                pass
            need(event and event["object"]["reason"] == "Expired", f"the slow watch ended with {event}")
            need(slow.event() is None, "a watch goes on after its end")
        except (OSError, ValueError, http.client.HTTPException):
            pass
    many = api.names("groups")
    need(len(many) == 900 and many == sorted(many), f"{len(many)} of 900 objects in pages")
    for number in range(900):
        api.want(200, "DELETE", f"/groups/g{number}")


def about_itself(api):
    need(api.want(200, "GET", "/livez", base="") == "ok\n", "livez")
    need(api.want(200, "GET", "/readyz", base="") == "ok\n", "readyz")
    need(api.want(200, "GET", "/version", base="")["apiVersion"] == "freeflow.io/v1", "version")
    served = api.want(200, "GET", "/openapi/v3", base="")
    need(served == json.loads((ROOT / "docs" / "openapi.json").read_text()), "docs/openapi.json is not what is served")


# ---- roles


def roles(host, api):
    reachable(host)
    with groups() as numbers:
        admin, viewer, blue, red = (numbers[name] for name in GROUPS)

        def codes(group_ids, *requests):
            return as_user(UID, group_ids, lambda: [api.ask(*request)[0] for request in requests])

        setup = [named("QosClass", "slow", {}), named("QosClass", "fast", {}),
                 named("Network", "blue", {"tenant": "blue", "cidrs": ["10.77.0.0/24"], "qosClass": "slow"}),
                 group("red-group", "red"), group("blue-group", "blue")]
        api.want(200, "POST", "/apply", {"items": setup})
        reads = [("GET", f"/{path}") for path in ("networks/blue", "networks/default", "groups/blue-group",
                                                  "groups/red-group", "qosclasses/slow", "qosclasses/fast", "hosts")]
        changes = [("PUT", "/groups/blue-group", group("blue-group", "blue", labels={"x": "y"})),
                   ("PUT", "/groups/red-group", group("red-group", "red", labels={"x": "y"})),
                   ("PUT", "/groups/red-group", group("red-group", "blue")),
                   ("PUT", "/quotas/mine", quota("mine", 1)), ("DELETE", "/groups/red-group"),
                   ("DELETE", "/networks/blue"),
                   ("POST", "/apply", {"items": [group("a", "blue"), group("b", "red")]})]
        for who, group_ids, reading, changing in [
                ("viewer", [viewer], [200] * 7, [403] * 7),
                ("blue", [blue], [200, 404, 200, 404, 200, 404, 200], [200, 403, 403, 403, 404, 403, 403]),
                ("nobody", [], [403] * 7, [403] * 7)]:
            got = codes(group_ids, *reads)
            need(got == reading, f"{who} reads: {got}, not {reading}")
            got = codes(group_ids, *changes)
            need(got == changing, f"{who} changes: {got}, not {changing}")
        got = codes([blue, red], ("POST", "/apply", {"items": [group("a", "blue"), group("b", "red")]}))
        need(got == [200], f"both tenants' admin: {got}")
        need(as_user(UID, [blue], api.names, "groups") == ["a", "blue-group"], "blue's list shows others'")
        need(as_user(UID, [blue], api.names, "hosts") == [], "hosts are not tenants'")
        need(codes([admin], ("PUT", "/quotas/mine", quota("mine", 1)), ("DELETE", "/quotas/mine")) == [201, 200], "admin")
        need(codes([], *[(method, path, None, "") for method, path in (("GET", "/livez"), ("GET", "/openapi/v3"),
                                                                       ("GET", "/version"))]) == [403] * 3, "nobody asks")

        def watched():
            with api.watch("/groups?watch=true") as watch:
                return [watch.event()["object"]["metadata"]["name"] for _ in range(2)]

        need(as_user(UID, [blue], watched) == ["a", "blue-group"], "blue watches others'")
        for path in ("groups/a", "groups/b", "groups/red-group", "groups/blue-group", "networks/blue", "qosclasses/slow",
                     "qosclasses/fast"):
            api.want(200, "DELETE", f"/{path}")


def other_namespace(host, api):
    """Root there is nobody here."""
    code = ("import http.client, socket\n"
            "connection = http.client.HTTPConnection('freeflow')\n"
            "connection.sock = socket.socket(socket.AF_UNIX)\n"
            f"connection.sock.connect({str(api.path)!r})\n"
            "connection.request('GET', '/version')\n"
            "print(connection.getresponse().status)\n")
    need(harness.run([sys.executable, "-c", code]).strip() == "200", "root is not served")
    unshared = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
    need(harness.run(unshared).strip() == "403", "another PID namespace's root is served")
    # Nor by the command's socket; and however often it tries, there are few lines of it.
    knock = ("import socket\n"
             f"for _ in range({KNOCKS}):\n"
             "    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:\n"
             f"        client.connect({str(host.run_dir / 'admin.sock')!r})\n"
             "        assert b'root' in client.recv(4096)\n")
    harness.run([*unshared[:-1], knock])
    lines = (host.run_dir / "router.log").read_text().count("refused a client of the admin socket")
    need(0 < lines < KNOCKS, f"{lines} lines of {KNOCKS} who are refused")


def directories(host):
    """All may reach the socket, and nothing else."""
    reachable(host)
    vnic = next((host.run_dir / "vnics").iterdir())

    def look():
        reached = []
        for path in (vnic / "router.sock", host.run_dir / "admin.sock"):
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
                client.connect(str(path))
                reached.append(str(path))
        for path in [host.run_dir, host.run_dir / "vnics", host.run_dir / "containers", host.run_dir / "logs"]:
            with contextlib.suppress(OSError):
                os.listdir(path)
                reached.append(str(path))
        for name in ("audit.log", "router.log", "state.redb", "up.json"):
            with contextlib.suppress(OSError):
                (host.run_dir / name).read_bytes()
                reached.append(name)
        return reached

    reached = as_user(UID, [], look)
    need(not reached, f"any user reaches {reached}")


def audited(host, api):
    api.want(201, "PUT", "/quotas/noted", quota("noted", 1))
    api.want(200, "PUT", "/quotas/noted", quota("noted", 1))
    api.want(200, "DELETE", "/quotas/noted")
    api.want(404, "DELETE", "/quotas/noted")
    path = host.run_dir / "audit.log"
    end = time.monotonic() + 10
    while True:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        ours = [(line["event"], line["verb"], line["outcome"], line["role"], line["uid"]) for line in lines
                if line.get("name") == "noted"]
        if len(ours) == 3 or time.monotonic() > end:
            break
        time.sleep(0.02)
    need(ours == [("change", "put", "created", "admin", 0), ("change", "delete", "deleted", "admin", 0),
                  ("refused", "delete", "NotFound", "admin", 0)], f"{ours}")
    need(path.stat().st_mode & 0o777 == 0o600, "others read the audit log")
    host.freeflow("network", "set", "default", "--data-path", "routed")
    host.freeflow("network", "set", "default", "--data-path", "auto")
    others = set(api.names("vnics"))
    container = host.container("noted")
    (vnic,) = set(api.names("vnics")) - others
    container.remove()
    expected = [("change", "set-data-path", "default", "configured")] * 2 + [
        ("change", "attach", vnic, "created"), ("change", "detach", vnic, "deleted")]

    def by_command():
        lines = map(json.loads, path.read_text().splitlines())
        return [(line["event"], line["verb"], line["name"], line["outcome"]) for line in lines
                if line.get("role") == "admin" and line["name"] in ("default", vnic)]

    while by_command()[-4:] != expected:
        need(time.monotonic() < end + 10, f"{by_command()[-4:]} is not {expected}")
        time.sleep(0.02)
    refused = [line for line in lines if line["event"] == "refused" and line["uid"] == UID]
    need(any(line["outcome"] == "Forbidden" and line["role"] == "none" for line in refused), "a stranger is not in the log")


def phases(host, api):
    """A watch is notified when a vNIC is ready."""
    others = api.names("vnics")
    with api.watch("/vnics?watch=true") as watch:
        container = host.container("ready")

        def event():
            while (event := watch.event()) and (event["type"] == "BOOKMARK" or event["object"]["metadata"]["name"] in others):
                pass
            return event

        reported = [event()]
        try:
            while reported[-1]["object"]["status"]["phase"] != "Ready":
                reported.append(event())
        finally:
            container.remove()
        need([event["type"] for event in reported] == ["ADDED", "MODIFIED"][:len(reported)], f"{reported}")
        end = event()
        while end["type"] == "MODIFIED":
            end = event()
        need(end["type"] == "DELETED", f"{end}")


# ---- hostile clients


def connect(api, timeout=30):
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(timeout)
    client.connect(str(api.path))
    return client


def ended(client, seconds):
    """Whether the server closes a connection, and what it said."""
    client.settimeout(seconds)
    said = b""
    try:
        while piece := client.recv(1 << 16):
            said += piece
    except ConnectionError:
        pass
    except TimeoutError:
        return None
    return said


def half_requests(api):
    """Those that begin and don't go on are cut off, and disturb nobody."""
    halves = [b"", b"GET", b"GET / HTTP/1.1\r\n", b"PUT /x HTTP/1.1\r\nContent-Length: 10\r\n",
              f"PUT {BASE}/quotas/x HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode()]
    clients = [connect(api) for _ in halves]
    for client, half in zip(clients, halves):
        client.sendall(half)
    api.want(200, "GET", "/version", base="")
    for client, half in zip(clients, halves):
        need(ended(client, 40) is not None, f"{half} holds a connection for ever")
        client.close()


def nonsense(api):
    for junk in (b"\0" * 1000, b"GET / HTTP/9.9\r\n\r\n", b"A" * 100_000, b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
                 b"PUT /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzzz\r\n",
                 b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", os.urandom(4096)):
        with connect(api) as client:
            with contextlib.suppress(OSError):
                client.sendall(junk)
                client.shutdown(socket.SHUT_WR)
            need(ended(client, 40) is not None, f"{junk[:20]} holds a connection")
    api.want(200, "GET", "/version", base="")


def huge_bodies(host, api):
    before = harness.router_memory_kib(host)
    head = f"PUT {BASE}/quotas/x HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 40}\r\n\r\n".encode()
    chunked = f"PUT {BASE}/quotas/x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    for begin, piece in ((head, b"x" * (1 << 20)), (chunked, b"100000\r\n" + b"x" * (1 << 20) + b"\r\n")):
        with connect(api) as client:
            with contextlib.suppress(OSError):
                client.sendall(begin)
                for _ in range(64):
                    client.sendall(piece)
            said = ended(client, 40)
            need(said is not None and (not said or b" 400 " in said[:20]), f"a huge body: {said}")
    deep = "[" * 100_000
    api.want(400, "PUT", "/quotas/x", deep)
    grown = harness.router_memory_kib(host) - before
    need(grown < 64 << 10, f"the router keeps {grown} KiB of what it refused")


def slow_readers(api):
    """A client that asks much and reads nothing is cut off."""
    request = b"GET /openapi/v3 HTTP/1.1\r\nHost: x\r\n\r\n"
    with connect(api) as client:
        client.setblocking(False)
        sent = 0
        end = time.monotonic() + 40
        while time.monotonic() < end:
            try:
                sent += client.send(request)
            except BlockingIOError:
                poller = select.poll()
                poller.register(client, select.POLLERR | select.POLLHUP)
                if poller.poll(200):
                    break
            except ConnectionError:
                break
        else:
            raise Failure("a client that reads nothing keeps its connection")
    api.want(200, "GET", "/version", base="")


def floods(host, api):
    """Ten thousand connections of a user without a role: the admin is served, and the router's descriptors are few."""
    reachable(host)

    def flood():
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
        clients = []
        for _ in range(CONNECTIONS):
            client = socket.socket(socket.AF_UNIX)
            client.setblocking(False)
            try:
                client.connect(str(api.path))
            except BlockingIOError:
                client.close()
                time.sleep(0.0005)
                continue
            except OSError:
                client.close()
                continue
            clients.append(client)
            if len(clients) > 900:
                clients.pop(0).close()
        return len(clients)

    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(UID, UID, UID)
            os.setresuid(UID, UID, UID)
            flood()
        finally:
            os._exit(0)
    most, asked = 0, 0
    end = time.monotonic() + 120
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        need(time.monotonic() < end, "the flood does not end")
        api.want(200, "GET", "/version", base="")
        asked += 1
        most = max(most, len(os.listdir(f"/proc/{host.router_pid()}/fd")))
    need(asked > 0, "nothing was asked meanwhile")
    return f"{asked} requests of the admin meanwhile, {most} descriptors at most"


def own_flood(host, api):
    """As many connections as the admin can hold: the router lives, has few descriptors, and serves again."""
    held = []
    before = len(os.listdir(f"/proc/{host.router_pid()}/fd"))
    try:
        for _ in range(900):
            try:
                held.append(connect(api, 0.2))
            except OSError:
                time.sleep(0.001)  # as many wait to be accepted as can
        most = len(os.listdir(f"/proc/{host.router_pid()}/fd"))
        need(most - before < DESCRIPTORS_MAX, f"{most} descriptors")
        host.status()
    finally:
        for client in held:
            client.close()
    end = time.monotonic() + 20
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if api.ask("GET", "/version", base="")[0] == 200:
                break
        need(time.monotonic() < end, "the server does not come back")
    return f"{most - before} descriptors more"


def nothing_is_left(host, before):
    end = time.monotonic() + 30
    while (now := len(os.listdir(f"/proc/{host.router_pid()}/fd"))) > before:
        need(time.monotonic() < end, f"{now} descriptors, {before} before")
        time.sleep(0.05)


@pytest.fixture(scope="module")
def api(host):
    harness.require_commands("groupadd", "groupdel", "unshare")
    return Api(host)


@pytest.fixture(scope="module", autouse=True)
def before(host, api):
    """Descriptors of the router."""
    host.container("here")
    return len(os.listdir(f"/proc/{host.router_pid()}/fd"))


@pytest.mark.parametrize("promise", [every_verb, dry_runs, applies, refusals, refusals_are_bounded, many_objects,
                                     many_live, watches, expiry, about_itself])
def test_requests(api, promise):
    promise(api)


@pytest.mark.parametrize("promise", [all_or_nothing, roles, other_namespace])
def test_who_may_do_what(host, api, promise):
    promise(host, api)


def test_directories(host):
    directories(host)


def test_changes_are_audited(host, api):
    audited(host, api)


def test_phases_of_containers(host, api):
    phases(host, api)


@pytest.mark.parametrize("promise", [half_requests, nonsense, slow_readers])
def test_hostile_clients(api, promise):
    promise(api)


@pytest.mark.parametrize("promise", [huge_bodies, floods, own_flood])
def test_hostile_amounts(host, api, promise):
    promise(host, api)


def test_nothing_is_left(host, before):
    nothing_is_left(host, before)
