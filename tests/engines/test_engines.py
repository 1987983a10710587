"""Docker 20.10 and 26.1, containerd 1.6 and 1.7, by CDI and by `freeflow runtime`, as docs/ENGINES.md says: `make test-engines`.

Unmodified programs of Debian in an image made of local files, unprivileged; ends of all kinds; hostile images.
"""

import os
import re
import signal

import pytest
import yaml

from harness import made_images, settings
from harness.engines import Containerd, Docker, wait_until
from harness.failure import need
from harness.processes import run

# An engine's class and folder, and the ways in which it gives a container its vNIC.
ENGINES = {
    "docker-20.10": (Docker, "docker-20", ["runtime"]),
    "docker-26.1": (Docker, "docker-26", ["cdi", "runtime"]),
    "containerd-1.6": (Containerd, "docker-20", ["runtime"]),
    # Its `ctr` knows no CDI; Kubernetes' way to it needs a client.
    "containerd-1.7": (Containerd, "docker-26", ["runtime"]),
}
WAYS = [(engine, way) for engine, (_, _, ways) in ENGINES.items() for way in ways]
MANY = 10
RED = "apiVersion: freeflow.io/v1\nkind: Network\nmetadata: {name: red}\nspec: {cidrs: [10.50.0.0/24]}\n"


class Place:
    """An engine, and the words by which a container of it gets a vNIC."""

    def __init__(self, engine, way):
        self.engine, self.way = engine, way
        self.given = engine.by_cdi() if way == "cdi" else engine.by_runtime()

    def in_red(self):
        if self.way == "cdi":
            return self.engine.by_cdi("freeflow.io/net=red")
        # 20.10 has no --annotation: a runtime of that network.
        if isinstance(self.engine, Docker) and not self.engine.knows_cdi():
            return ["--runtime", "freeflow-red"]
        return self.engine.by_runtime("red")


@pytest.fixture(scope="module")
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


def each_way(test):
    return pytest.mark.parametrize("engine, way", WAYS, indirect=["engine"])(test)


def on(*names):
    ways = [pair for pair in WAYS if pair[0] in names]
    return pytest.mark.parametrize("engine, way", ways, indirect=["engine"])


def listens(engine):
    """Whether the only container has a socket that listens: of TCP, or of rdma_cm."""
    pid = int(engine.host.containers()[0]["pid"])
    with open(f"/proc/{pid}/net/tcp") as sockets:
        return " 0A " in sockets.read() or engine.host.status()["cm"]["listener_count"] > 0


def between_two(place, server, client):
    """A server in one container, and a client that gets its address in another; what the client printed."""
    engine = place.engine
    engine.detached("server", place.given, *server)
    address = engine.address()
    wait_until(lambda: listens(engine), "the server listens")
    output = engine.run("client", place.given, *(word.replace("{ip}", address) for word in client))
    engine.remove("server")
    engine.wait_for_no_vnic()
    return output


@each_way
def test_unmodified_programs_unprivileged(place):
    output = place.engine.run("one", place.given, "sh", "-c", "ibv_devinfo; ls /run/freeflow /sys/class/net")
    need("freeflow0" in output and "PORT_ACTIVE" in output and "ff0" in output, output)
    place.engine.wait_for_no_vnic()
    words = ["ib_write_bw", "-F", "-n", "200"]
    output = between_two(place, words, [*words, "{ip}"])
    need(re.search(r"^ 65536 +200 ", output, re.M), output)


@each_way
def test_rdma_cm(place):
    output = between_two(place, ["rping", "-s", "-a", "0.0.0.0", "-C", "10"], ["sh", "-c", "rping -c -a {ip} -C 10 -v && echo done"])
    need("done" in output, output)


@each_way
def test_a_network_is_chosen_by_who_starts_the_container(place):
    place.engine.detached("one", place.in_red(), "sleep", "600")
    need([vnic["network"] for vnic in place.engine.vnics()] == ["red"], place.engine.vnics())


@each_way
def test_a_killed_shim_leaves_nothing(place):
    place.engine.detached("one", place.given, "sleep", "600")
    need(len(place.engine.vnics()) == 1, "no vNIC")
    os.kill(place.engine.shim_of("one"), signal.SIGKILL)
    place.engine.wait_for_no_vnic()


@each_way
def test_a_killed_program_leaves_nothing(place):
    place.engine.detached("one", place.given, "sleep", "600")
    os.kill(int(place.engine.host.containers()[0]["pid"]), signal.SIGKILL)
    place.engine.remove("one")
    place.engine.wait_for_no_vnic()


@on("docker-20.10", "docker-26.1")
def test_pause_and_update(place):
    place.engine.detached("one", place.given, "sleep", "600")
    place.engine.call("pause", "one")
    place.engine.call("unpause", "one")
    place.engine.call("update", "--cpu-shares", "512", "one")
    need("freeflow0" in place.engine.call("exec", "one", "ibv_devinfo"), "no device")


@each_way
def test_many_at_once(place):
    running = [place.engine.begun(f"many{number}", place.given, "ibv_devinfo") for number in range(MANY)]
    for one in running:
        need(one.wait(300) == 0 and "PORT_ACTIVE" in one.output(), one.output())


@each_way
def test_other_sockets_and_files_are_out_of_reach(place):
    run_dir = place.engine.host.run_dir
    place.engine.detached("other", place.given, "sleep", "600")
    output = place.engine.run("one", place.given, "sh", "-c",
                              f"cd /run/freeflow && for f in . /run/freeflow/* {run_dir}; do echo \"$f\"; done;"
                              " echo x >/run/freeflow/x && echo written; ls /run/freeflow/../.. >/dev/null;"
                              f" [ -e {run_dir} ] && echo host; true")
    need("written" not in output and "host" not in output, output)
    need("admin.sock" not in output and "router.sock" in output, output)


def hostile_root(engine, bait):
    """Links that lead out of the image if followed by name, a FIFO where the hook reads."""
    root = made_images.make_root(engine.directory / "hostile", "sh", "ls")
    up = "../" * 14
    (bait / "run").mkdir(parents=True)
    (bait / "library").touch()
    (root / "run").rmdir()
    (root / "run").symlink_to(f"{up}{bait}/run")
    (root / made_images.LIBRARIES / "libibverbs.so.1").symlink_to(f"{up}{bait}/library")
    (root / "usr/lib64").symlink_to("/proc/1/root/tmp")
    os.mkfifo(root / "etc/ld.so.conf")
    return root


@on("docker-20.10", "docker-26.1")
def test_a_hostile_image_reaches_nothing(place):
    engine, bait = place.engine, place.engine.directory / f"bait-{place.way}"
    root = hostile_root(engine, bait)
    try:
        engine.import_root("hostile:1", root)
        engine.run("one", place.given, "ls", "/", image="hostile:1", codes=(0, 1, 125, 126, 127))
    finally:
        run(["rm", "-rf", root])
    need(not list((bait / "run").iterdir()), "something was made outside of the image")
    need((bait / "library").stat().st_size == 0, "something was mounted outside of the image")
    engine.wait_for_no_vnic()


@on("docker-20.10", "docker-26.1")
def test_an_image_chooses_nothing(place):
    engine = place.engine
    engine.import_root("chooser:1", changes=["ENV LD_PRELOAD=/no/such.so", "ENV FREEFLOW_LIBDIR=/nowhere",
                                             "LABEL freeflow.io/network=red", "LABEL freeflow.io/vnic=boss"])
    engine.detached("one", place.given, "sleep", "600", image="chooser:1")
    need([vnic["network"] for vnic in engine.vnics()] == ["default"], engine.vnics())
    engine.remove("one")
    engine.wait_for_no_vnic()
    engine.import_root("chooser:2", changes=["ENV FREEFLOW_NETWORK=red"])
    if place.way == "cdi":
        engine.detached("one", place.given, "sleep", "600", image="chooser:2")
        need([vnic["network"] for vnic in engine.vnics()] == ["default"], engine.vnics())
    else:
        output = engine.run("one", place.given, "ls", image="chooser:2", codes=(125, 127))
        need("the image's author" in output, output)


@each_way
def test_an_unknown_network_is_refused_with_its_name(place):
    given = place.engine.by_cdi("freeflow.io/net=blue") if place.way == "cdi" else place.engine.by_runtime("blue")
    if place.way == "runtime" and place.engine.folder.name == "docker-20" and isinstance(place.engine, Docker):
        given = [*place.given, "--env", "FREEFLOW_NETWORK=blue"]
    output = place.engine.run("one", given, "ls", codes=(1, 125, 126, 127))
    need("blue" in output, output)


def services():
    """Of the compose file in docs/ENGINES.md."""
    text = (settings.ROOT / "docs/ENGINES.md").read_text()
    return yaml.safe_load(re.search(r"^```yaml\n(services:.*?)^```", text, re.M | re.S)[1])["services"]


@pytest.mark.parametrize("engine, way", [("docker-26.1", "cdi")], indirect=["engine"])
def test_the_compose_example(place):
    """Each service by the options of `docker run` that its keys stand for; an address in place of the server's name."""
    options = {"devices": "--device", "cap_drop": "--cap-drop", "security_opt": "--security-opt"}
    engine, server = place.engine, None
    for name, service in services().items():
        keys = set(service) - {"image", "command", "depends_on", "user"} - set(options)
        need(not keys, f"keys that this test does not know: {keys}")
        given = [word for key, option in options.items() for value in service.get(key, ()) for word in (option, value)]
        words = service["command"].replace("server", server or "server").split()
        if server is None:
            engine.detached(name, given, *words)
            server = engine.address()
            wait_until(lambda: listens(engine), "the server listens")
        else:
            need("65536" in (output := engine.run(name, given, *words)), output)
