"""Objects that have a manager, such as Kubernetes: whose they are to change, by command and by REST."""

import json
import time

import pytest

from harness import api as rest
from harness import need
from harness.host import kill_router
from harness.users import as_user, reachable

NAME = "k8s.team.red"
PATH = f"/networks/{NAME}"
MANAGER = {"name": "kubernetes", "change": "kubectl edit networks.freeflow.io red -n team"}
WORDS = ("managed by kubernetes", MANAGER["change"], "--take-over")


def network(cidr="10.78.0.0/24", manager=None, name=NAME):
    metadata = {"name": name, **({"manager": manager} if manager else {})}
    return {"apiVersion": "freeflow.io/v1", "kind": "Network", "metadata": metadata,
            "spec": {"tenant": "k8s.team", "cidrs": [cidr]}}


@pytest.fixture
def api(host):
    return rest.Api(host)


@pytest.fixture
def managed(host, api):
    """A network as Kubernetes declares it; it is gone after the test."""
    api.want(201, "PUT", f"{PATH}?manager=kubernetes", network(manager=MANAGER))
    yield
    host.freeflow("delete", "network", NAME, "--take-over", "--ignore-not-found")


def audit(host, **wanted):
    """The last line of the audit log with these fields."""
    end = time.monotonic() + 10
    while True:
        lines = map(json.loads, (host.run_dir / "audit.log").read_text().splitlines())
        found = [line for line in lines if all(line.get(key) == value for key, value in wanted.items())]
        if found:
            return found[-1]
        need(time.monotonic() < end, f"no line with {wanted} in the audit log")
        time.sleep(0.02)


def written(host, value):
    path = host.directory / "managed.json"
    path.write_text(json.dumps(value))
    return path


def test_others_are_refused_with_the_owner(host, api, managed):
    path = written(host, network("10.79.0.0/24"))
    for words in (("apply", "-f", path), ("delete", "network", NAME), ("delete", "-f", path), ("diff", "-f", path)):
        message = host.freeflow(*words, codes=(3,))
        need(all(word in message for word in WORDS), f"{words}: {message}")
    host.freeflow("network", "set", NAME, "--data-path", "routed", codes=(1, 3))
    for answer in (api.want(409, "PUT", PATH, network("10.79.0.0/24")), api.want(409, "DELETE", PATH),
                   api.want(409, "POST", "/apply", {"items": [network("10.79.0.0/24")]}),
                   api.want(409, "DELETE", f"{PATH}?manager=nomad"),
                   api.want(409, "PUT", "/networks/k8s.team.red/dataPath", {"dataPath": "routed"})):
        need(answer["reason"] == "Conflict" and all(word in answer["message"] for word in WORDS), str(answer))
    # Nor in the name of a cluster that this host does not follow.
    api.want(403, "DELETE", f"{PATH}?follow=true")
    api.want(403, "POST", "/apply?follow=true", {"items": [network("10.79.0.0/24")]})
    there = api.want(200, "GET", PATH)
    need(there["spec"]["cidrs"] == ["10.78.0.0/24"] and there["spec"]["dataPath"] == "auto", str(there))
    # As it is read it is applied, and changes nothing.
    text = host.freeflow("get", "network", NAME, "-o", "yaml")
    need("manager:" in text and MANAGER["change"] in text, text)
    path.write_text(text)
    need("unchanged" in host.freeflow("apply", "-f", path), "an object as it was read changes something")
    need(not host.freeflow("diff", "-f", path).strip(), "an object as it was read differs")
    described = host.freeflow("describe", "network", NAME)
    need("Manager:" in described and "kubernetes" in described and MANAGER["change"] in described, described)


def test_the_manager_changes_its_own_alone(host, api, managed):
    host.freeflow("apply", "-f", written(host, network("10.80.0.0/24", name="mine")))
    try:
        api.want(409, "PUT", "/networks/mine?manager=kubernetes", network("10.81.0.0/24", name="mine"))
        api.want(409, "DELETE", "/networks/mine?manager=kubernetes")
    finally:
        host.freeflow("delete", "network", "mine")
    for answer in (api.want(422, "PUT", "/networks/other?manager=kubernetes", network(name="other")),
                   api.want(422, "PUT", "/networks/k8s.team.blue", network("10.81.0.0/24", name="k8s.team.blue"))):
        need(answer["details"]["causes"][0]["field"] == "metadata.name", str(answer))
    answer = api.want(422, "PUT", "/networks/other", network(manager=MANAGER, name="other"))
    need(answer["details"]["causes"][0]["field"] == "metadata.manager", str(answer))
    for query in ("manager=kubernetes&takeOver=true", "takeOver=yes"):
        api.want(400, "DELETE", f"{PATH}?{query}")
    changed = api.want(200, "PUT", f"{PATH}?manager=kubernetes", network("10.79.0.0/24", manager=MANAGER))
    need(changed["metadata"]["manager"] == MANAGER, str(changed))
    line = audit(host, name=NAME, outcome="configured")
    need(line["detail"] == "managed by kubernetes", str(line))
    # It is in the store, too.
    kill_router(host)
    host.up()
    need(api.want(200, "GET", PATH)["metadata"]["manager"] == MANAGER, "the router's death took the manager away")
    api.want(409, "DELETE", PATH)
    api.want(200, "DELETE", f"{PATH}?manager=kubernetes")


def test_only_admins_are_managers(host, api, managed):
    reachable(host)
    with rest.groups() as numbers:
        for group in (numbers["freeflow-viewer"], numbers["freeflow-tenant-blue"]):
            for query in ("manager=kubernetes", "takeOver=true"):
                for method, path, body in (("DELETE", PATH, None), ("PUT", PATH, network()),
                                           ("POST", "/apply", {"items": [network()]})):
                    code, answer = as_user(rest.UID, [group], api.ask, method, f"{path}?{query}", body)
                    need(code == 403, f"{method} {query}: {code} {answer}")


def test_an_operator_takes_over(host, api, managed):
    path = written(host, network("10.79.0.0/24"))
    need("configured" in host.freeflow("apply", "-f", path, "--take-over", "--dry-run"), "a dry run")
    need("manager" in api.want(200, "GET", PATH)["metadata"], "a dry run has taken it over")
    host.freeflow("apply", "-f", path, "--take-over")
    taken = api.want(200, "GET", PATH)
    need("manager" not in taken["metadata"] and taken["spec"]["cidrs"] == ["10.79.0.0/24"], str(taken))
    line = audit(host, name=NAME, verb="take-over", outcome="configured")
    need(line["detail"] == "taken over from the manager kubernetes", str(line))
    # It is nobody's whose manager comes back.
    answer = api.want(409, "PUT", f"{PATH}?manager=kubernetes", network(manager=MANAGER))
    need("declared by hand" in answer["message"], str(answer))
    host.freeflow("delete", "network", NAME)
    api.want(201, "PUT", f"{PATH}?manager=kubernetes", network(manager=MANAGER))
    host.freeflow("delete", "network", NAME, "--take-over")
    line = audit(host, name=NAME, verb="take-over", outcome="deleted")
    need(line["detail"] == "taken over from the manager kubernetes", str(line))
