"""The vNIC in `/sys/class`: every file says what the verbs say, counters count traffic, the rest of sysfs works on, and
nobody can write there or see another's. In `freeflow run` containers, and in podman by the CDI device. On another data path than a
host's own only the counters: the rest is the same."""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time

import pytest

import harness
from harness import need, podman
from harness.settings import DIST

DEVICE = "/sys/class/infiniband/freeflow0"
VERBS = "/sys/class/infiniband_verbs"
COUNTERS = f"{DEVICE}/ports/1/counters"
HARDWARE = f"{DEVICE}/ports/1/hw_counters"
# The router writes every 250 ms; the rest is patience for a busy machine.
FRESH_S = 10
READ_ALL = f"cd /sys/class && grep -rs '' {DEVICE}/ {VERBS}/uverbs0/ {DEVICE}/device/ {VERBS}/abi_version"


def parse(text):
    """`grep -r` prints `path:line`; a file of several lines keeps its last."""
    files = {}
    for line in text.splitlines():
        path, found, value = line.partition(":")
        if found:
            files[path.replace("//", "/")] = value
    return files


def devinfo(text):
    """The fields of `ibv_devinfo -v` that stand on a line of their own."""
    pairs = (re.match(r"\s*([\w\[\] ]+?):\s+(.*\S)", line) for line in text.splitlines())
    return {match.group(1): match.group(2) for match in pairs if match}


def number(text):
    """The number in `PORT_ACTIVE (4)`."""
    return int(re.search(r"\((\d+)\)", text).group(1))


def compare(files, info, interface):
    device = {path[len(DEVICE) + 1:]: value for path, value in files.items() if path.startswith(DEVICE + "/")}
    port = {path[len("ports/1/"):]: value for path, value in device.items() if path.startswith("ports/1/")}
    gid, kind = re.match(r"(\S+), (.*)", info["GID[  0]"]).groups()
    address = int(port["gids/0"].replace(":", ""), 16)
    lanes, _, speed = info["active_width"].partition("X")[0], None, float(info["active_speed"].split()[0])
    wanted = {
        "fw_ver": (device["fw_ver"], info["fw_ver"]),
        "node_guid": (device["node_guid"], info["node_guid"]),
        "sys_image_guid": (device["sys_image_guid"], info["sys_image_guid"]),
        "hw_rev": (int(device["hw_rev"], 16), int(info["hw_ver"], 16)),
        "board_id": (device["board_id"], info["board_id"]),
        "node_type": (device["node_type"], "1: CA"),
        "vendor": (int(device["device/vendor"], 16), int(info["vendor_id"], 16)),
        "device": (int(device["device/device"], 16), int(info["vendor_part_id"])),
        "state": (int(port["state"].split(":")[0]), number(info["state"])),
        "phys_state": (int(port["phys_state"].split(":")[0]), number(info["phys_state"])),
        "lid": (int(port["lid"], 16), int(info["port_lid"])),
        "lid_mask_count": (int(port["lid_mask_count"]), int(info["port_lmc"], 16)),
        "sm_lid": (int(port["sm_lid"], 16), int(info["sm_lid"])),
        "cap_mask": (int(port["cap_mask"], 16), int(info["port_cap_flags"], 16)),
        "link_layer": (port["link_layer"], info["link_layer"]),
        "rate": (port["rate"], f"{int(lanes) * speed:g} Gb/sec ({lanes}X EDR)"),
        "gids": (len([name for name in port if name.startswith("gids/")]), int(info["gid_tbl_len"])),
        "pkeys": (len([name for name in port if name.startswith("pkeys/")]), int(info["pkey_tbl_len"])),
        "gids/0": (f"::ffff:{'.'.join(str(byte) for byte in (address & 0xffffffff).to_bytes(4, 'big'))}", gid),
        "gid_attrs/types/0": (port["gid_attrs/types/0"], kind),
        "gid_attrs/ndevs/0": (port.get("gid_attrs/ndevs/0"), interface),
        "pkeys/0": (port["pkeys/0"], "0xffff"),
        "ibdev": (files[f"{VERBS}/uverbs0/ibdev"], info["hca_id"]),
        "verbs abi_version": (files[f"{VERBS}/abi_version"], "6"),
    }
    wrong = [f"{name}: sysfs says {here!r}, the verbs {there!r}" for name, (here, there) in wanted.items() if here != there]
    need(not wrong, "\n".join(wrong))
    return f"{len(wanted)} values"


def says_what_the_verbs_say(container):
    files = parse(container.exec("sh", "-c", READ_ALL.replace(f"{DEVICE}/device/", f"{DEVICE}/device/vendor "
                                                              f"{DEVICE}/device/device")))
    return compare(files, devinfo(container.exec("ibv_devinfo", "-v")), "ff0")


def python(container, text, seconds=60):
    return container.exec("python3", "-c", text, seconds=seconds)


def looks_like_the_kernels(container):
    """Paths that programs take for granted: two up from the device's real path is its bus device, links lead on."""
    output = python(container, f"""
import os
assert os.path.realpath('{DEVICE}/../..') == os.path.realpath('{DEVICE}/device'), os.path.realpath('{DEVICE}/../..')
assert os.path.realpath('{VERBS}/uverbs0/device') == os.path.realpath('{DEVICE}/device')
assert os.path.realpath('{DEVICE}/subsystem') == '/sys/class/infiniband'
assert os.listdir('/sys/class/infiniband') == ['freeflow0'] and 'uverbs0' in os.listdir('{VERBS}')
assert os.listdir('{DEVICE}/device/infiniband_verbs') == ['uverbs0']
assert not [name for name in os.listdir('/sys/class') if name.startswith('infiniband') and name not in
            ('infiniband', 'infiniband_verbs', 'infiniband_mad')]
number = os.stat('/dev/infiniband/uverbs0').st_rdev
assert open('{VERBS}/uverbs0/dev').read() == f'{{os.major(number)}}:{{os.minor(number)}}\\n'
near = open('{DEVICE}/device/local_cpus').read().strip()
online = open('{DEVICE}/device/local_cpulist').read()
assert bin(int(near.replace(',', ''), 16)).count('1') == os.sysconf('SC_NPROCESSORS_ONLN'), near
assert online == open('/sys/devices/system/cpu/online').read()
interface = open('{DEVICE}/ports/1/gid_attrs/ndevs/0').read().strip()
assert open(f'/sys/class/net/{{interface}}/operstate').read()
assert os.listdir('{DEVICE}/device/net') == [interface]
assert open(f'{DEVICE}/device/net/{{interface}}/address').read() == open(f'/sys/class/net/{{interface}}/address').read()
print('good')
""")
    need(output.strip() == "good", output)


def other_classes_work(container):
    """Also those of things that come later: a merged file system would not see them."""
    host = {name for name in os.listdir("/sys/class") if not name.startswith("infiniband")}
    inside = set(container.exec("ls", "/sys/class").split())
    need(inside - {"infiniband", "infiniband_verbs", "infiniband_mad"} == host, f"{inside} instead of {host}")
    need(container.exec("cat", "/sys/class/net/lo/mtu").strip() == "65536", "lo's MTU")
    need(container.exec("readlink", "-f", "/sys/class/net/lo") == "/sys/devices/virtual/net/lo\n", "where lo leads")
    enter = ["nsenter", "--net", "--target", container.pid]
    container.exec("ls", "/sys/class/net/ffnew", codes=range(1, 128))
    harness.run([*enter, "ip", "link", "add", "ffnew", "type", "veth", "peer", "ffnewer"])
    need(container.exec("cat", "/sys/class/net/ffnew/ifindex").strip().isdigit(), "a new interface is not seen")
    harness.run([*enter, "ip", "link", "delete", "ffnew"])
    container.exec("ls", "/sys/class/net/ffnew", codes=range(1, 128))


def can_t_be_written(container):
    for command in (["touch", "/sys/class/x"], ["touch", f"{DEVICE}/x"], ["rm", "-f", f"{DEVICE}/node_guid"],
                    ["chmod", "0666", f"{COUNTERS}/port_xmit_data"], ["sh", "-c", f"echo 1 >{COUNTERS}/port_xmit_data"],
                    ["umount", "/sys/class/infiniband"], ["mount", "-o", "remount,bind,rw", "/sys/class/infiniband"],
                    ["mkdir", "/sys/class/infiniband/other"], ["touch", "/run/freeflow/sysfs/x"]):
        code = subprocess.run(container.command(*command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                              timeout=60).returncode
        need(code != 0, f"the container could: {' '.join(command)}")
    lines = [line.split() for line in container.exec("cat", "/proc/self/mountinfo").splitlines()]
    ours = [fields for fields in lines if re.match(r"/sys/class(/\.freeflow|/infiniband.*)?$", fields[4])]
    need(len(ours) == 5, f"mounts: {ours}")
    for fields in ours:
        need({"ro", "nosuid", "nodev", "noexec"} <= set(fields[5].split(",")), f"{fields[4]} is mounted {fields[5]}")


def only_its_own(one, two):
    guids = [container.exec("cat", f"{DEVICE}/node_guid") for container in (one, two)]
    need(guids[0] != guids[1], f"both see {guids[0]}")
    for container, other in ((one, two), (two, one)):
        everything = container.exec("sh", "-c", "grep -rs '' /sys/class/.freeflow /run/freeflow/sysfs || true")
        need(f"{container.name} freeflow0" in everything, "its own description is not there")
        need(f"{other.name} freeflow0" not in everything, "the other's description is there")


# ---- counters


def counters(container):
    found = parse(container.exec("grep", "-rs", "", COUNTERS, HARDWARE))
    return {path.rsplit("/", 1)[1]: int(value) for path, value in found.items()}


def moved(before, after):
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


def deviations(changes, sent, received):
    """Counts of client and server that differ from the bytes and packets that went each way."""
    for who, change, ways in (("client", changes[0], ("xmit", "rcv")), ("server", changes[1], ("rcv", "xmit"))):
        for way, (data, packets) in zip(ways, (sent, received)):
            wanted = {f"port_{way}_data": data // 4, f"port_{way}_packets": packets, f"unicast_{way}_packets": packets}
            yield from (f"{who}: {name} moved by {change.get(name, 0)}, not by {value}"
                        for name, value in wanted.items() if change.get(name, 0) != value)
        yield from (f"{who}: {name} moved" for name in change if "err" in name)


def traffic(server, client, words, sent, received):
    """Runs a perftest; what the client's port sent and received is what was said, and the other way for the server."""
    before = [counters(container) for container in (client, server)]
    harness.in_two_containers(server, client, [*words, "-F"], [*words, "-F", "{ip}"], seconds=40)
    end = time.monotonic() + FRESH_S
    while True:
        changes = [moved(then, counters(container)) for then, container in zip(before, (client, server))]
        wrong = list(deviations(changes, sent, received))
        if not wrong:
            return changes
        need(time.monotonic() < end, "\n".join(wrong))
        time.sleep(0.05)


def moved_to(container, before, name, wanted):
    """Files of one port are written one after another."""
    end = time.monotonic() + FRESH_S
    while (now := counters(container)[name] - before) != wanted:
        need(time.monotonic() < end, f"{name} moved by {now}, not by {wanted}")
        time.sleep(0.05)


def writes_count(server, client):
    """1000 WRITEs of 64 KiB with an MTU of 1024: 64 packets each."""
    before = counters(server)["rx_write_requests"]
    traffic(server, client, ["ib_write_bw", "-n", "1000", "-s", "65536", "-m", "1024"], (65536 * 1000, 64 * 1000), (0, 0))
    moved_to(server, before, "rx_write_requests", 1000)


def reads_count(server, client):
    before = counters(server)["rx_read_requests"]
    traffic(server, client, ["ib_read_bw", "-n", "500", "-s", "10000", "-m", "4096"], (0, 500), (10000 * 500, 3 * 500))
    moved_to(server, before, "rx_read_requests", 500)


def atomics_count(server, client):
    before = counters(server)["rx_atomic_requests"]
    traffic(server, client, ["ib_atomic_bw", "-n", "500"], (0, 500), (8 * 500, 500))
    moved_to(server, before, "rx_atomic_requests", 500)


def datagrams_count(server, client):
    traffic(server, client, ["ib_send_bw", "-c", "UD", "-n", "500", "-s", "1000"], (1000 * 500, 500), (0, 0))


class Rival:
    """A plain program that writes as many files as the router does, as it does, on the same disk: what can be asked of that disk."""

    FILES = 8  # of two busy ports
    PAUSE_S = 0.25

    def __init__(self, directory):
        self.directory, self.rounds, self.is_over = directory, 0, threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        while not self.is_over.wait(self.PAUSE_S):
            for index in range(self.FILES):
                beside = self.directory / ".rival-new"
                beside.write_text(f"{self.rounds}\n")
                beside.rename(self.directory / f".rival-{index}")
            self.rounds += 1

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.is_over.set()
        self.thread.join()
        for path in self.directory.glob(".rival-*"):
            path.unlink()


def live_and_whole(server, client):
    """While traffic flows a value is never torn, never goes back, and is never old; at worst half as fresh as the disk allows."""
    words = ["ib_write_bw", "-F", "-D", "8", "-s", "4096"]
    reader = client.start("python3", "-uc", f"""
import time
last, changed, oldest, seen = -1, time.monotonic(), 0, 0
end = changed + 30
while time.monotonic() < end:
    text = open('{COUNTERS}/port_xmit_data').read()
    assert text.endswith('\\n') and text[:-1].isdigit(), text
    value, now = int(text), time.monotonic()
    assert value >= last, (last, value)
    if value != last:
        if seen > 2:
            oldest = max(oldest, now - changed)
        seen, last, changed = seen + 1, value, now
        if seen == 2:
            end = now + 4
print(seen, oldest)
""")
    with Rival(client.host.directory) as rival:
        harness.in_two_containers(server, client, words, [*words, "{ip}"], seconds=40)
        need(reader.wait(60) == 0, reader.output())
    seen, oldest = reader.output().split()
    wanted = min(6, rival.rounds // 2)
    need(int(seen) >= max(wanted, 2), f"only {seen} values in four seconds, at best {rival.rounds}")
    return f"{seen} values, at most {float(oldest):.2f} s apart"


def switches(host):
    """How often each thread of the router gave up its processor, by name."""
    found = {}
    for task in pathlib.Path(f"/proc/{host.router_pid()}/task").iterdir():
        status = (task / "status").read_text()
        name = re.search(r"Name:\s+(\S+)", status).group(1)
        found[name] = int(re.search(r"\nvoluntary_ctxt_switches:\s+(\d+)", status).group(1))
    return found


def idle_costs_nothing(host):
    """Without traffic no thread wakes up."""
    end = time.monotonic() + 20
    while True:
        before = switches(host)
        time.sleep(1.5)
        woken = {name: count - before[name] for name, count in switches(host).items() if count != before[name]}
        if not woken:
            return ", ".join(sorted(before))
        need(time.monotonic() < end, f"woken while idle: {woken}")


def a_full_disk_harms_nothing():
    """Others take all inodes of the run directory's file system: counters stop, the log says so once, verbs go on, and a new
    container is refused with the reason."""
    work = pathlib.Path(tempfile.mkdtemp(prefix="freeflow-test-full."))
    harness.run(["mount", "-t", "tmpfs", "-o", "size=8m,nr_inodes=600", "tmpfs", work])
    try:
        command = [DIST / "bin" / "freeflow", "--run-dir", work / "run"]
        try:
            harness.run([*command, "up"])
            harness.run([*command, "run", "-d", "--share-host", "--name", "one", "--", "sleep", "infinity"])
            inside = [*command, "exec", "one", "--"]
            harness.run([*inside, "ibv_devinfo"])
            take_all_inodes(work)
            statuses = [harness.program("statuses"), "loopback", "send_rc", "one_sided_rc"]
            harness.run([*inside, *statuses])
            complaints = wait_for_complaint(work / "run" / "router.log")
            harness.run([*inside, *statuses])
            refused = harness.run([*command, "run", "--", "true"], codes=(125,))
            need("No space left" in refused, refused)
            log = (work / "run" / "router.log").read_text()
            need(complaints == 1 and log.count(COMPLAINT) == 1, f"the router says:\n{log}")
        finally:
            for file in work.glob("taken*"):
                file.unlink()
            harness.run([*command, "down", "--force"])
    finally:
        harness.run(["umount", "--lazy", work])
        work.rmdir()


COMPLAINT = "can't write a vNIC's sysfs"


def take_all_inodes(directory):
    with contextlib.suppress(OSError):
        for number in range(1000):
            (directory / f"taken{number}").touch()


def wait_for_complaint(log, seconds=20):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        count = log.read_text().count(COMPLAINT)
        if count:
            return count
        time.sleep(0.05)
    return 0


def router_restarts(host, container):
    """The port is down while there is no router, and up in the very same mounts when there is one again."""
    state = ["cat", f"{DEVICE}/ports/1/state"]
    need(container.exec(*state) == "4: ACTIVE\n", "it is not up")
    harness.end_router(host, signal.SIGTERM)
    need(read_inside(container, "state") == "1: DOWN\n", "it is not down")
    host.up()
    need(container.exec(*state) == "4: ACTIVE\n", "it is not up again")
    need(container.exec("cat", f"{DEVICE}/ports/1/gid_attrs/ndevs/0") == "ff0\n", "its interface was forgotten")


def read_inside(container, name):
    """A file of the port without the command, which needs the router."""
    return pathlib.Path(f"/proc/{container.pid}/root/sys/class/.freeflow/infiniband/freeflow0/ports/1/{name}").read_text()


def tools(container):
    """ibstat and ibstatus, where they are installed."""
    output = container.exec("ibstat")
    need(all(word in output for word in ("CA 'freeflow0'", "State: Active", "Rate: 100", "Link layer: Ethernet")), output)
    output = container.exec("ibstatus")
    need("4: ACTIVE" in output and "100 Gb/sec (4X EDR)" in output, output)


# ---- podman


def in_podman(containers):
    script = f"ibv_devinfo -v; echo =====; {READ_ALL} {DEVICE}/device/vendor {DEVICE}/device/device; ls /sys/class/net"
    info, _, files = containers.run(podman.UNPRIVILEGED, "/:O", "sh", "-c", script).partition("=====\n")
    need(files.endswith("ff0\nlo\n"), f"the interfaces:\n{files[-200:]}")
    return compare(parse(files), devinfo(info), "ff0")


def in_podman_as_root(containers):
    """Root of a container, with the capabilities podman leaves it, changes nothing."""
    output = containers.run(("--network", "none"), "/:O", "sh", "-c", f"""
for command in "touch {DEVICE}/x" "umount /sys/class/infiniband" "umount /sys/class" "mkdir /sys/class/x" "rm {DEVICE}/fw_ver"
do $command 2>/dev/null && echo "could: $command"; done; cat {DEVICE}/ports/1/state""")
    need(output == "4: ACTIVE\n", output)


def host_network(containers):
    """No interface of the container has the address, so none is named; and the host's sysfs stays as it is."""
    output = containers.run(("--network", "host"), "/:O", "sh", "-c",
                        f"cat {DEVICE}/ports/1/state; ls {DEVICE}/ports/1/gid_attrs/ndevs")
    need(output == "4: ACTIVE\n", output)
    need(not pathlib.Path("/sys/class/.freeflow").exists(), "the host's /sys/class was covered")


def shared_sys(containers):
    """Even where the container's /sys propagates back, nothing arrives on the host's side."""
    script = ('mount --make-rshared / && before=$(ls -A /sys/class | sort | md5sum) && '
              'mkdir -p /etc/cdi && mount --bind "$1" /etc/cdi && shift && "$@" && '
              '[ "$before" = "$(ls -A /sys/class | sort | md5sum)" ] && echo unchanged')
    words = [*containers.podman, "run", "--rm", "--network", "none", "--ulimit", "nofile=1024:1024", "--ulimit",
             "nproc=1024:1024", "--device", "freeflow.io/net=default", "-v", "/sys:/sys:rshared", "-v",
             "/sys/fs/cgroup:/sys/fs/cgroup", "--rootfs", "/:O", "cat",
             f"{DEVICE}/node_type"]
    output = harness.run(["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh",
                      containers.host.directory / "cdi", *words], seconds=90)
    need(output.endswith("unchanged\n") and "1: CA" in output, output)


def not_the_kernels(containers):
    """A volume in the place of /sys is left alone, and the container runs."""
    volume = containers.host.directory / "volume"
    (volume / "class" / "net").mkdir(parents=True)
    (volume / "fs" / "cgroup").mkdir(parents=True)
    output = containers.run(podman.UNPRIVILEGED + ("-v", f"{volume}:/sys:ro", "-v", "/sys/fs/cgroup:/sys/fs/cgroup"), "/:O",
                        "sh", "-c", "ls -A /sys/class; ibv_devices")
    need(output.split()[:1] == ["net"] and "freeflow0" in output or "/sys is not the kernel's" in output, output)


def hostile_image(containers, what, arrange):
    """An image whose /sys is not what it seems: nothing is mounted or made outside of it, and it starts or is refused."""
    image, bait = containers.host.directory / f"image-{what}", containers.host.directory / "bait"
    for directory in ("bin", "etc", "proc", "dev", "tmp", "run", "lib64", "usr/lib/x86_64-linux-gnu"):
        (image / directory).mkdir(parents=True)
    (bait / "class" / "net").mkdir(parents=True, exist_ok=True)
    (image / "lib").symlink_to("usr/lib")
    for program in ("sh", "ls"):
        path = shutil.which(program)
        shutil.copy(path, image / "bin" / program)
        for library in re.findall(r"=> (/\S+)", harness.run(["ldd", path])):
            shutil.copy(library, image / "usr/lib/x86_64-linux-gnu")
    shutil.copy("/lib64/ld-linux-x86-64.so.2", image / "lib64")
    arrange(image, bait)
    # Of those that others make meanwhile nothing is said.
    mounts = lambda: [line for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
                      if str(image) in line or str(bait) in line]
    before = mounts()
    output = containers.run(podman.UNPRIVILEGED, f"{image}:O", "ls", "-A", "/sys/class", codes=range(128))
    need(mounts() == before, "a mount on the host")
    need(sorted(path.name for path in bait.rglob("*")) == ["class", "net"], "something was made outside of the image")
    return output.strip().splitlines()[-1][:60] if output.strip() else "started without"


def link_out(image, bait):
    (image / "sys").symlink_to("../../../../../../../../../.." + str(bait))


def link_to_proc(image, _):
    (image / "sys").symlink_to("/proc/1/root/sys")


def link_of_class(image, bait):
    (image / "sys").mkdir()
    (image / "sys" / "class").symlink_to("../../../../../../../../../.." + str(bait) + "/class")


@pytest.fixture(scope="module", autouse=True)
def programs():
    harness.require_commands("ibv_devinfo", "ib_write_bw", "python3")


@pytest.mark.usual_path
@pytest.mark.parametrize("promise", [says_what_the_verbs_say, looks_like_the_kernels, other_classes_work,
                                     can_t_be_written])
def test_container(server, promise):
    promise(server)


@pytest.mark.usual_path
def test_container_sees_only_its_own(server, client):
    only_its_own(server, client)


@pytest.mark.parametrize("promise", [writes_count, reads_count, atomics_count, datagrams_count, live_and_whole])
def test_counters(server, client, promise):
    promise(server, client)


def test_idle_costs_nothing(host, pair):
    idle_costs_nothing(host)


@pytest.mark.usual_path
def test_ibstat_and_ibstatus(server):
    harness.require_commands("ibstat", "ibstatus")
    tools(server)


@pytest.mark.usual_path
def test_router_restarts(host, server):
    router_restarts(host, server)


@pytest.mark.usual_path
def test_full_disk_harms_nothing():
    a_full_disk_harms_nothing()


@pytest.fixture(scope="module")
def containers():
    with podman.on_own_host() as containers:
        yield containers


@pytest.mark.usual_path
@pytest.mark.parametrize("promise", [in_podman, in_podman_as_root, host_network, shared_sys, not_the_kernels])
def test_podman(containers, promise):
    promise(containers)


@pytest.mark.usual_path
@pytest.mark.parametrize("arrange", [link_out, link_to_proc, link_of_class])
def test_hostile_image(containers, arrange):
    hostile_image(containers, arrange.__name__, arrange)
