"""Engines, the ways in which each gives a container its vNIC, and the place where a test runs: an engine and a way."""

import pytest

from harness.engines import Containerd, Docker
from harness.pods import Pods

# An engine's class and folder, and its ways.
ENGINES = {
    "docker-20.10": (Docker, "docker-20", ["runtime"]),
    "docker-26.1": (Docker, "docker-26", ["cdi", "runtime"]),
    # By `ctr`, which knows no CDI; and by CRI, as the kubelet does.
    "containerd-1.6": (Containerd, "docker-20", ["runtime"]),
    "containerd-1.7": (Containerd, "docker-26", ["runtime"]),
    "cri-1.6": (Pods, "docker-20", ["runtime"]),
    "cri-1.7": (Pods, "docker-26", ["cdi", "runtime"]),
}
WAYS = [(engine, way) for engine, (_, _, ways) in ENGINES.items() for way in ways]
RED = "apiVersion: freeflow.io/v1\nkind: Network\nmetadata: {name: red}\nspec: {cidrs: [10.50.0.0/24]}\n"


class Place:
    """An engine, and the words by which a container of it gets a vNIC."""

    def __init__(self, engine, way):
        self.engine, self.way = engine, way
        self.given = engine.by_cdi() if way == "cdi" else engine.by_runtime()

    def in_network(self, name):
        if self.way == "cdi":
            return self.engine.by_cdi(f"freeflow.io/net={name}")
        # 20.10 has no --annotation: a runtime of that network.
        if isinstance(self.engine, Docker) and not self.engine.knows_cdi():
            return ["--runtime", f"freeflow-{name}"]
        return self.engine.by_runtime(name)


@pytest.fixture(scope="session")
def engine(request):
    kind, folder, _ = ENGINES[request.param]
    engine = kind(folder)
    try:
        file = engine.host.directory / "red.yaml"
        file.write_text(RED)
        engine.host.freeflow("apply", "-f", file)
        yield engine
    finally:
        engine.close()


@pytest.fixture
def place(engine, way):
    place = Place(engine, way)
    yield place
    for name in engine.names():
        engine.remove(name)
    engine.wait_for_no_vnic()


def pytest_generate_tests(metafunc):
    """A test that takes a place runs at each; `at(ENGINE…)`, or ENGINE-WAY, names some."""
    if "place" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("at")
        names = mark.args if mark else ENGINES
        chosen = [pair for pair in WAYS if pair[0] in names or "-".join(pair) in names]
        metafunc.parametrize("engine, way", chosen, indirect=["engine"], scope="session")


@pytest.hookimpl(trylast=True)  # after pytest has put cases of one parameter together, whose number differs between tests
def pytest_collection_modifyitems(items):
    """Each engine begins once."""
    ours = [item for item in items if "place" in getattr(item, "fixturenames", ())]
    order = list(ENGINES)
    at = set(ours)
    in_order = iter(sorted(ours, key=lambda item: order.index(item.callspec.params["engine"])))
    items[:] = [next(in_order) if item in at else item for item in items]
