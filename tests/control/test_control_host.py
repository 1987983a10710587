"""Subresources of the Host and of a Network by REST: reads, changes, refusals; each role; the audit log."""

import json
import time

import pytest

import harness
from harness import need
from harness.api import GROUPS, UID, Api, groups
from harness.users import as_user, reachable


def of_the_host(host, api):
    """Subresources of the Host: what the command shows, and what it changes; the data path of a network."""
    name = api.want(200, "GET", "/version", base="")["host"]
    need(api.names("hosts") == [name], "the version names another host")
    path = f"/hosts/{name}"
    status = api.want(200, "GET", f"{path}/router")
    need(status["kind"] == "RouterStatus" and status["status"]["vnicCount"] == 1, f"{status}")
    shown = host.status()
    for key, value in status["status"].items():
        if isinstance(value, (str, bool)) and key != "sleeping":
            snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in key)
            need(shown[snake] == value, f"{key}: the command shows {shown[snake]}, not {value}")
    vnics = api.want(200, "GET", f"{path}/vnics")
    need([(vnic["name"], vnic["network"]) for vnic in vnics["items"]] == [("here", "default")], f"{vnics}")
    need(vnics["metadata"]["continue"] == "" and dict(vnics["items"][0]["labels"])["engine"] == "freeflow", f"{vnics}")
    need(api.want(200, "GET", f"{path}/vnics?continue={vnics['items'][0]['id']}")["items"] == [], "a vNIC behind the last")
    networks = api.want(200, "GET", f"{path}/networks")
    need([(network["name"], network["vnicCount"]) for network in networks["items"]] == [("default", 1)], f"{networks}")
    need(networks["items"][0]["pool"] in api.want(200, "GET", "/networks/default")["spec"]["cidrs"], f"{networks}")
    qps = api.want(200, "GET", f"{path}/qps")
    need(qps["items"] == [] and qps["metadata"]["continue"] == "", f"{qps}")
    api.want(404, "GET", f"{path}/qps?vnic=none")
    api.want(400, "GET", f"{path}/qps?continue=x")
    wire = api.want(200, "GET", f"{path}/wire")
    need(wire["status"]["open"] is False and wire["status"]["counters"] == {}, f"{wire}")
    cm = api.want(200, "GET", f"{path}/cm")
    need(cm["status"]["ids"] == [] and cm["status"]["counts"]["idCount"] == 0, f"{cm}")
    api.want(400, "GET", f"{path}/cm?continue=7")
    need(api.want(200, "GET", f"{path}/peers")["status"]["peers"] == [], "peers")
    for part in ("router", "vnics", "networks", "qps", "wire", "cm", "peers"):
        api.want(404, "GET", f"/hosts/another/{part}")
        api.want(400, "GET", f"{path}/{part}?unknown=1")
        api.want(405, "DELETE", f"{path}/{part}")
    # Changes: refused here, where there are no other hosts, and each is in the audit log.
    need(api.want(422, "PUT", f"{path}/wire/faults", {"lossPpm": 5})["reason"] == "Invalid", "faults without a wire")
    api.want(422, "PUT", f"{path}/wire/faults", {"loss": 5})
    api.want(422, "DELETE", f"{path}/wire/faults")
    api.want(404, "POST", f"{path}/peers/reload")
    api.want(404, "POST", "/hosts/another/peers/reload")
    for data_path in ("routed", "auto"):
        api.want(200, "PUT", "/networks/default/dataPath", {"dataPath": data_path})
        need(api.want(200, "GET", "/networks/default")["spec"]["dataPath"] == data_path, "it is not stored")
    api.want(404, "PUT", "/networks/none/dataPath", {"dataPath": "routed"})
    api.want(422, "PUT", "/networks/default/dataPath", {"dataPath": "wrong"})
    wanted = {("wire-faults", "Invalid"): 2, ("reload-peers", "NotFound"): 1, ("set-data-path", "configured"): 2}
    end = time.monotonic() + 20
    # A change is answered before its line is written.
    while True:
        lines = [json.loads(line) for line in (host.run_dir / "audit.log").read_text().splitlines(keepends=True) if line.endswith("\n")]
        said = [(line.get("verb"), line.get("outcome")) for line in lines]
        if all(said.count(of) >= count for of, count in wanted.items()):
            break
        need(time.monotonic() < end, f"not all of {wanted}: {said}")
        time.sleep(0.05)


def roles(host, api):
    """Admins and viewers read; admins change."""
    reachable(host)
    path = "/hosts/" + api.want(200, "GET", "/version", base="")["host"]
    reads = [("GET", f"{path}/{part}") for part in ("router", "vnics", "networks", "qps", "wire", "cm", "peers")]
    changes = [("PUT", f"{path}/wire/faults", {}), ("DELETE", f"{path}/wire/faults"), ("POST", f"{path}/peers/reload"),
               ("PUT", "/networks/default/dataPath", {"dataPath": "auto"})]
    with groups() as numbers:
        admin, viewer, blue, _ = (numbers[name] for name in GROUPS)
        for who, group_ids, reading, changing in [
                ("admin", [admin], 200, [422, 422, 404, 200]), ("viewer", [viewer], 200, [403] * 4),
                ("blue", [blue], 403, [403] * 4), ("nobody", [], 403, [403] * 4)]:
            for requests, expected in ((reads, [reading] * len(reads)), (changes, changing)):
                got = as_user(UID, group_ids, lambda: [api.ask(*request)[0] for request in requests])
                need(got == expected, f"{who}: {got}, not {expected}")
        need("host" not in as_user(UID, [blue], api.want, 200, "GET", "/version", None, ""), "a tenant learns the host's name")


@pytest.fixture(scope="module")
def api(host):
    harness.require_commands("groupadd", "groupdel")
    host.container("here")
    return Api(host)


@pytest.mark.parametrize("promise", [of_the_host, roles])
def test_subresources(host, api, promise):
    promise(host, api)
