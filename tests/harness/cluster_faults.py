"""Random faults of a cluster, by a seed: a schedule of what operators, containers and faults do, who carries it out on a
laboratory of three hosts, and what is recorded meanwhile for the checks of `harness.cluster_history`."""

import base64
import concurrent.futures
import contextlib
import ipaddress
import itertools
import json
import os
import pathlib
import random
import signal
import threading
import time

import harness
from harness import cluster_history as history
from harness.api import Api
from harness.cluster import HOSTS, Hosts, name_of
from harness.failure import Failure, need
from harness.host import router_of
from harness.processes import run
from harness.settings import PORT
from harness.stepped import SteppedPrograms

VNICS = ("alpha", "beta", "gamma")
NETWORKS = ("blue", "green")  # come and go
FLEETING = "fleeting"  # a vNIC that does
FLOATING = ipaddress.ip_network("10.50.0.224/27")  # the last eighth of the network red
SECONDS = 2.0  # in which actions begin
FAULT_SECONDS = (0.3, 1.5)
# All are equal so soon after the last command has ended, counted in time in which no task of the machine waited for a
# processor, by the kernel's account, as stages run beside each other; and so soon by the clock, whatever else runs.
EQUAL_SECONDS = 5
EQUAL_SECONDS_MAX = 20
CPU_PRESSURE = pathlib.Path("/proc/pressure/cpu")
# A word to people about vNICs, by which nobody goes: on a busy machine it is tried again after twenty times what the
# router took to answer (`REST_FOR_ANSWERS` in crates/cli/src/publisher.rs).
OF_VIEWS = "can't say which vNICs this host has"
COMMAND_SECONDS = 60
PATIENCE_SECONDS = 1.0
# Hosts whose clocks are stepped; an operator is on the other one.
STEPPED = (2, 3)
# Multiples of `history.STEP_UNIT_S`. By a clock that is behind no certificate has begun to be good; by one that is ahead
# none has ended.
STEP_HOURS = (-24, -6, 6, 24)
AHEAD_S = 1_000_000
WEIGHTS = {
    "run": 6, "end": 3, "move": 2, "force": 2, "declare": 2, "delete": 2, "kill follower": 2, "stop follower": 2,
    "kill router": 2, "kill etcd": 2, "stop etcd": 1, "slow etcd": 1, "cut": 2,
    "step clock": 3,
}


def stalled_seconds():
    """For how long tasks have waited for a processor, since the machine began; none where the kernel does not say."""
    try:
        some = CPU_PRESSURE.read_text().splitlines()[0]
    except OSError:
        return 0.0
    return int(some.split("total=")[1]) / 1e6


NETWORK = """
apiVersion: freeflow.io/v1
kind: Network
metadata: {name: NAME}
spec: {tenant: TENANT, cidrs: [CIDR]}
"""
VNIC = """
apiVersion: freeflow.io/v1
kind: Vnic
metadata: {name: NAME}
spec: {network: red}
"""
# Bursts of a disk that does not answer: etcd says and hears nothing meanwhile.
SLOW_SECONDS, QUICK_SECONDS = 0.12, 0.05


def declaration(name):
    if name in NETWORKS:
        number = 60 + NETWORKS.index(name)
        return NETWORK.replace("NAME", name).replace("TENANT", "blue").replace("CIDR", f"10.{number}.0.0/24")
    return VNIC.replace("NAME", name)


def schedule(seed):
    """The host whose packets faults may stop, and actions: (seconds after the beginning, words)."""
    chosen = random.Random(seed)
    victim, actions = chosen.choice(HOSTS), []

    def fault(at, begin, end, *words):
        actions.append((at, (begin, *words)))
        actions.append((at + chosen.uniform(*FAULT_SECONDS), (end, *words)))
    for kind in chosen.choices(list(WEIGHTS), WEIGHTS.values(), k=chosen.randint(7, 12)):
        at, host, vnic = chosen.uniform(0, SECONDS), chosen.choice(HOSTS), chosen.choice(VNICS)
        match kind:
            case "run" | "end":
                actions.append((at, (kind, chosen.choice((*VNICS, FLEETING)), host)))
            case "move" | "force":
                actions.append((at, (kind, vnic, host)))
            case "declare" | "delete":
                actions.append((at, (kind, chosen.choice((*NETWORKS, FLEETING)))))
            case "kill follower":
                fault(at, kind, "up", host)
            case "stop follower":
                fault(at, kind, "continue follower", host)
            case "kill router":
                fault(at, kind, "up", victim)
            case "kill etcd":
                fault(at, kind, "start etcd", host)
            case "stop etcd":
                fault(at, kind, "continue etcd", host)
            case "slow etcd":
                fault(at, kind, "quick etcd")
            case "cut":
                fault(at, kind, "heal", victim)
            case "step clock":
                fault(at, kind, "set clock", chosen.choice(STEPPED), chosen.choice(STEP_HOURS))
    return victim, sorted(actions)


def shown(actions):
    return "\n".join(f"  {at:5.2f} s  {' '.join(map(str, words))}" for at, words in actions)


class FaultyHosts(Hosts):
    """Three hosts, two of them controllers, with a container each that nobody ends: it notes whose packets its router
    accepts, sends to whoever holds an address, and carries the traffic that no fault may disturb."""

    controllers = (1, 2)
    operator_at = 1
    etcd_options = {"election_ms": 1000}

    def __init__(self):
        super().__init__()
        try:
            self.prepare()
        except BaseException:
            self.close()
            raise

    def prepare(self):
        self.began = time.time()
        self.clocks = {n: SteppedPrograms(self.lab.directory / f"stepped{n}", n * AHEAD_S) for n in STEPPED}
        for number, programs in self.clocks.items():
            host = self.host(number)
            host.freeflow("down", "--force")
            host.freeflow_path, host.prefix = programs.path, programs.prefix
        self.as_operator("cluster", "init")
        for number in HOSTS:
            self.join(number)
        self.wait_for_all()
        self.apply(NETWORK.replace("NAME", "red").replace("TENANT", "red").replace("CIDR", "10.50.0.0/24")
                   + "".join(f"---{declaration(vnic)}" for vnic in VNICS))
        self.wait("a block for each", lambda: all(self.network(n, "red") for n in HOSTS))
        self.addresses = {name: row["spec"]["addresses"][0] for name, row in self.declared_vnics().items()}
        self.program, self.load = harness.program("holders"), harness.program("load")
        self.watched = self.lab.directory / "watched"
        self.watched.mkdir()
        self.fixed = {n: self.host(n).container("fixed", "--network", "red") for n in HOSTS}
        for number, container in self.fixed.items():
            container.start(self.program, self.watched, f"{name_of(number)}.watcher", container.ip, number, 0, ".holder")
        self.wait("watchers", lambda: len(list(self.watched.glob("*.watcher"))) == len(HOSTS))
        self.wanted = {f"vnics/{vnic}": True for vnic in VNICS} | {"networks/red": True}
        self.read, self.runs, self.numbers = {}, {}, itertools.count(1)
        self.forces, self.keys = [], {}
        self.revision = self.mark()

    def declared_vnics(self):
        items = json.loads(self.as_operator("get", "vnics", "-o", "json"))["items"]
        return {item["metadata"]["name"]: item for item in items if item["metadata"]["name"] in VNICS}

    def follower(self, number):
        """The process that follows the cluster, if it lives."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            pid = json.loads((self.host(number).run_dir / "cluster.pid").read_text())["pid"]
            return pid if router_of(pid, self.host(number).run_dir) else None

    def time_of(self, text):
        """Of a log's line, whatever the clock of its host was."""
        return history.unstepped(history.log_time(text), self.began)

    # ---- etcd's history

    def mark(self):
        """A revision that comes after all before."""
        return json.loads(self.etcd.ctl("put", "/mark", "here", "-w", "json"))["header"]["revision"]

    def changes(self, since, until):
        """All changes of etcd's keys between two marks."""
        etcd = self.etcd
        words = ["etcdctl", "--endpoints", ",".join(etcd.urls()), "--cacert", "ca.pem", "--cert", "root.pem", "--key", "root.key",
                 "watch", "--prefix", "/", "--rev", str(since + 1), "-w", "json"]
        watch = harness.Running(self.lab.host(1).enter("env", f"--chdir={etcd.directory}", "ETCDCTL_API=3", *words))
        end = time.monotonic() + 20
        try:
            while True:
                events = [event for line in watch.output().splitlines(True) if line.endswith("\n")
                          for event in json.loads(line)["Events"]]
                if any(event["kv"]["mod_revision"] >= until for event in events):
                    return [change_of(event) for event in events]
                need(time.monotonic() < end and watch.process.poll() is None, f"etcd's history is not to be had: {watch.output()[-500:]}")
                time.sleep(0.02)
        finally:
            watch.kill()

    def stored(self):
        """What etcd has now: `kind/name` of all that is declared, places with their revisions, and which of those their
        hosts have let go."""
        rows = json.loads(self.etcd.ctl("get", "--prefix", "/freeflow/", "-w", "json")).get("kvs", ())
        declared, places, released = set(), {}, set()
        for row in rows:
            part, _, key = base64.b64decode(row["key"]).decode().removeprefix("/freeflow/").partition("/data/")
            value, object_name = base64.b64decode(row.get("value", "")), "/".join(key.split("/")[-2:])
            if part == "declared" and object_name.startswith(("networks/", "vnics/")):
                declared.add(object_name)
            elif part == "places" and key != "serial":
                places[key] = (row["mod_revision"], json.loads(value))
            elif part.startswith("hosts/") and key == "holdings":
                vnics = json.loads(value).get("vnics", {})
                released |= {(part.removeprefix("hosts/"), name, held["at"]) for name, held in vnics.items() if held.get("released")}
        return declared, places, released

    def on_hosts(self):
        """`kind/name` of all that each host's router has of the cluster's."""
        found = {}
        for number in HOSTS:
            api = Api(self.host(number))
            found[name_of(number)] = {f"networks/{name}" for name in api.names("networks") if name != "default"} | {
                f"vnics/{name}" for name in api.names("vnics", "?floating=true")}
        return found


def change_of(event):
    kv = event["kv"]
    key, text = base64.b64decode(kv["key"]).decode(), base64.b64decode(kv.get("value", "")) if event.get("type") != 1 else b""
    value = None
    with contextlib.suppress(ValueError):
        value = json.loads(text)
    return history.Change(kv["mod_revision"], key, value if isinstance(value, dict) else None)


class Recorder:
    """Notes each version of the hosts' peers files, and until when it was there."""

    def __init__(self, hosts):
        self.paths = {n: hosts.host(n).run_dir / "cluster" / "peers.json" for n in HOSTS}
        self.versions = {n: [] for n in HOSTS}
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.look_on)
        self.thread.start()

    def look_on(self):
        while not self.over.wait(0.02):
            for number, path in self.paths.items():
                self.look(self.versions[number], path)

    @staticmethod
    def look(versions, path):
        with contextlib.suppress(OSError, ValueError):
            now, written = time.time(), path.stat().st_mtime_ns / 1e9
            if versions and versions[-1][0] == written:
                versions[-1] = (written, now, versions[-1][2])
                return
            peers = json.loads(path.read_text())["peers"]
            holders = {prefix.split("/")[0]: peer["host"] for peer in peers for prefix in peer["prefixes"] if prefix.endswith("/32")}
            if path.stat().st_mtime_ns / 1e9 == written:
                versions.append((written, now, holders))

    def stop(self):
        self.over.set()
        self.thread.join()


class Trial:
    """One seed: its actions, and the checks afterwards."""

    def __init__(self, hosts, seed):
        self.hosts, self.seed = hosts, seed
        self.victim, self.actions = schedule(seed)
        self.notes, self.begin, self.healed = [], time.time(), None
        self.pool = concurrent.futures.ThreadPoolExecutor(16)
        # Operators speak one after the other, so that it is known what was said last.
        self.operator = concurrent.futures.ThreadPoolExecutor(1)
        self.members = threading.RLock()
        self.stopped, self.quick, self.claiming, self.runs = set(), threading.Event(), [], {}
        self.recorder = Recorder(hosts)

    # ---- what goes on

    def play(self):
        """All of it, until everything is healed and every command has ended; gives the time of that."""
        pending, begin = [], time.monotonic()
        first = [self.pool.submit(self.act, ("run", vnic, HOSTS[(self.seed + i) % len(HOSTS)])) for i, vnic in enumerate(VNICS)]
        concurrent.futures.wait(first)
        begin = time.monotonic()
        for at, words in self.actions:
            time.sleep(max(0.0, begin + at - time.monotonic()))
            pool = self.operator if words[0] in ("declare", "delete") else self.pool
            pending.append(pool.submit(self.act, words))
        self.heal()
        healed = self.healed = time.monotonic()
        # An operator may lose patience with a container whose vNIC does not come.
        concurrent.futures.wait(pending, timeout=PATIENCE_SECONDS)
        for running in self.claiming:
            running.terminate()
        for one in (*first, *pending):
            one.result(timeout=COMMAND_SECONDS)
        ended = time.monotonic()
        self.note(f"healed after {healed - begin:.2f} s, all commands ended after {ended - begin:.2f} s")
        return ended

    def note(self, text):
        self.notes.append(f"  {time.time() - self.begin:6.2f} s  {text}")

    def notes_of_end(self):
        return next(text for text in reversed(self.notes) if "healed" in text).split("s  ", 1)[1]

    def act(self, words):
        begin = time.time()
        said = getattr(self, words[0].replace(" ", "_"))(*words[1:])
        said = str(said or "").strip().replace("\n", " / ")[:300]
        self.note(f"{' '.join(map(str, words))} (since {begin - self.begin:.2f} s): {said}")

    def run(self, vnic, host):
        number = next(self.hosts.numbers)
        self.hosts.runs[number] = vnic
        if vnic in self.hosts.addresses:
            self.runs[number] = (vnic, host)
        running = harness.Running(self.hosts.host(host).command(
            "run", "-d", "--rm", "--share-host", "--name", vnic, "--vnic", vnic, "--", self.hosts.program, self.hosts.watched,
            f"{number}.holder", self.hosts.addresses.get(vnic, "-"), host, number, ".watcher"))
        self.claiming.append(running)
        running.wait(COMMAND_SECONDS)
        return running.output()

    def end(self, vnic, host):
        return self.freeflow(host, "rm", "-f", vnic)

    def freeflow(self, host, *words):
        return self.hosts.host(host).freeflow(*words, codes=range(256), seconds=COMMAND_SECONDS)

    def move(self, vnic, host, *options):
        return self.hosts.as_operator("move", vnic, "--to", name_of(host), "--seconds", "3", *options, codes=range(256))

    def force(self, vnic, host):
        begin = time.time()
        try:
            return self.move(vnic, host, "--force")
        finally:
            self.hosts.forces.append(history.Force(self.hosts.addresses[vnic], name_of(host), begin, time.time()))

    def declare(self, name):
        path = self.hosts.lab.directory / f"{name}.yaml"
        path.write_text(declaration(name))
        return self.change(name, True, "apply", "-f", path)

    def delete(self, name):
        return self.change(name, False, "delete", "network" if name in NETWORKS else "vnic", name)

    def change(self, name, to, *words):
        key, wanted = f"networks/{name}" if name in NETWORKS else f"vnics/{name}", self.hosts.wanted
        before, wanted[key] = wanted.get(key, False), None
        said = self.hosts.as_operator(*words, codes=range(256))
        # A refusal may speak of a vNIC that was deleted.
        if "nothing was changed" in said or "NotFound" in said:
            wanted[key] = before
        elif any(word in said for word in ("created", "unchanged", "deleted")):
            wanted[key] = to
        return said

    # ---- faults

    def kill_follower(self, host):
        pid = self.hosts.follower(host)
        return self.send_signal(pid, signal.SIGKILL)

    def stop_follower(self, host):
        pid = self.hosts.follower(host)
        self.stopped.add(pid)
        return self.send_signal(pid, signal.SIGSTOP)

    def continue_follower(self, host):
        return self.send_signal(self.hosts.follower(host), signal.SIGCONT)

    @staticmethod
    def send_signal(pid, number):
        with contextlib.suppress(ProcessLookupError):
            if pid:
                os.kill(pid, number)
                return f"process {pid}"
        return "there is none"

    def kill_router(self, host):
        with contextlib.suppress(ProcessLookupError, OSError):
            return harness.end_router(self.hosts.host(host))
        return "there is none"

    def up(self, host):
        return self.freeflow(host, "up")

    def kill_etcd(self, number):
        with self.members:
            self.hosts.etcd.kill(number)

    def start_etcd(self, number):
        with self.members:
            if number not in self.hosts.etcd.members:
                self.hosts.etcd.start(number)

    def stop_etcd(self, number, to=signal.SIGSTOP):
        with self.members:
            member = self.hosts.etcd.members.get(number)
            return self.send_signal(member.pid, to) if member else "there is none"

    def continue_etcd(self, number):
        return self.stop_etcd(number, signal.SIGCONT)

    def slow_etcd(self):
        self.quick.clear()
        while not self.quick.is_set():
            for to, seconds in ((signal.SIGSTOP, SLOW_SECONDS), (signal.SIGCONT, QUICK_SECONDS)):
                for number in HOSTS:
                    self.stop_etcd(number, to)
                time.sleep(seconds)

    def quick_etcd(self):
        self.quick.set()

    def cut(self, host):
        self.hosts.lab.cut(host)

    def step_clock(self, host, hours):
        self.hosts.clocks[host].step(hours * 3600)

    def set_clock(self, host, _hours):
        self.hosts.clocks[host].step(0)

    def heal(self, host=None):
        """One host's link; without one everything that there is to heal."""
        if host is not None:
            return self.hosts.lab.heal(host)
        self.quick.set()
        for clock in self.hosts.clocks.values():
            clock.step(0)
        for number in HOSTS:
            self.continue_follower(number)
            self.start_etcd(number)
            self.continue_etcd(number)
        self.hosts.lab.heal(self.victim)
        self.signal_all(signal.SIGCONT)
        for number in HOSTS:
            if not self.hosts.follower(number) or not self.hosts.host(number).is_up():
                self.up(number)
        return None

    def signal_all(self, number):
        """Followers that were stopped and are recorded no more."""
        for pid in self.stopped:
            if pid and any(router_of(pid, self.hosts.host(n).run_dir) for n in HOSTS):
                self.send_signal(pid, number)

    # ---- the traffic that no fault touches

    def start_traffic(self):
        one, two = (self.hosts.fixed[n] for n in HOSTS if n != self.victim)
        self.server = one.start(self.hosts.load, "-e", "-p", 5, "server", PORT)
        one.wait_for_port(self.server)
        self.client = two.start(self.hosts.load, "-e", "-p", 5, "client", one.ip, PORT)
        for side in (self.server, self.client):
            side.wait_for_output("ready")

    def stop_traffic(self):
        self.client.terminate()
        for side in (self.client, self.server):
            code = side.wait(30)
            need(code == 0 and "all right" in side.output(), f"traffic of hosts without faults was disturbed ({code}):\n{side.output()}")
        return int(self.client.output().strip().splitlines()[-1].split()[2])

    # ---- checks

    def wait_until_equal(self, since):
        last, stalled = ["nobody has looked"], stalled_seconds()
        while (passed := time.monotonic() - since) < EQUAL_SECONDS_MAX and passed - (stalled_seconds() - stalled) < EQUAL_SECONDS:
            before = last
            try:
                last = self.unequal()
            except (Failure, OSError, ValueError, KeyError) as error:
                last = [f"not to be had: {str(error)[:200]}"]
            if not last:
                return time.monotonic() - since
            if last != before:
                self.note(f"unequal: {'; '.join(last)[:300]}")
            time.sleep(0.1)
        raise Failure(f"hosts are not equal {time.monotonic() - since:.1f} s after the last command, in which tasks waited for a processor for "
                      f"{stalled_seconds() - stalled:.1f} s:\n  " + "\n  ".join(last))

    def unequal(self):
        hosts = self.hosts
        in_etcd, places, released = hosts.stored()
        wrong = history.unequal_hosts(in_etcd, places, released, hosts.on_hosts())
        wrong += history.lost_objects(hosts.wanted, in_etcd)
        if not wrong:
            status = hosts.status()
            rows = {row["name"]: row for row in status["hosts"]}
            wrong += [f"{name} has followed {row['revision']} of {status['declared_revision']}, {row['problems']}"
                      for name, row in rows.items() if row["revision"] < status["declared_revision"] or row["problems"]]
            wrong += [f"{name_of(n)} is not there" for n in HOSTS if name_of(n) not in rows]
            for number in HOSTS:
                file = hosts.host(number).run_dir / "cluster.problems"
                said = json.loads(file.read_text()) if file.exists() else []
                wrong += [f"{name_of(number)} says: {text}" for text in said if not text.startswith(OF_VIEWS)]
        return wrong

    def check(self):
        """Faults in what has happened since the beginning; and counts of what there was."""
        hosts = self.hosts
        self.recorder.stop()
        holdings, beliefs, stepped = [], [], 0
        for number in HOSTS:
            host, name = hosts.host(number), name_of(number)
            there = Api(host).want(200, "GET", "/vnics?floating=true")["items"]
            present = {address for item in there for address in item["spec"]["addresses"] if is_floating(address)}
            audit = history.lines_of(host.run_dir / "audit.log")
            stepped += sum(abs(history.log_time(row["time"]) - hosts.time_of(row["time"])) > 1 for row in audit)
            holdings += history.holdings_of(name, audit, is_floating, present, hosts.time_of)
            beliefs += history.beliefs_of(name, self.recorder.versions[number], reads_of(host, audit, hosts.time_of))
        packets, deliveries = self.packets(), self.deliveries()
        until, (declared, _, _) = hosts.mark(), hosts.stored()
        changes = hosts.changes(hosts.revision, until)
        hosts.revision = until
        forces_to = {}
        for force in hosts.forces:
            vnic = next(vnic for vnic, address in hosts.addresses.items() if address == force.address)
            forces_to.setdefault(vnic, set()).add(force.to)
        wrong = history.two_holders([one for one in holdings if (one.end or time.time()) > self.begin - 1], hosts.forces)
        wrong += history.late_packets(packets, beliefs)
        wrong += history.late_deliveries(deliveries, beliefs)
        wrong += history.unreleased_places([*hosts.keys.values(), *changes], forces_to)
        hosts.keys |= {change.key: change for change in changes}
        hosts.wanted = {key: key in declared for key in hosts.wanted}
        placed = sum(change.key.startswith("/freeflow/places/data/") and not change.key.endswith("/serial") for change in changes)
        return wrong, {"packets": len(packets), "deliveries": len(deliveries), "beliefs": len(beliefs), "places": placed,
                       "holdings": len(holdings), "stepped": stepped}

    def packets(self):
        """Those of holders that the routers of watchers have accepted since the last trial."""
        found = []
        for number in HOSTS:
            for at, _, sender, run_number in self.new_lines(f"{name_of(number)}.watcher"):
                address = self.hosts.addresses.get(self.hosts.runs.get(run_number))
                if address:
                    found.append(history.Packet(at, name_of(number), name_of(sender), address))
        return found

    def deliveries(self):
        """Those of watchers that holders were given in this trial."""
        found = []
        for number, (vnic, host) in self.runs.items():
            for at, sent, sender, _ in self.new_lines(f"{number}.holder"):
                found.append(history.Delivery(sent, at, name_of(sender), name_of(host), self.hosts.addresses[vnic]))
        return found

    def new_lines(self, name):
        """What an end has noted since it was last asked: times in seconds of the receipt and of the sending, and the
        sender's host and run."""
        path, read = self.hosts.watched / f"{name}.log", self.hosts.read
        if not path.exists():
            return
        with open(path, "rb") as file:
            file.seek(read.get(name, 0))
            text = file.read()
        text = text[:text.rfind(b"\n") + 1]
        read[name] = read.get(name, 0) + len(text)
        for words in (line.split() for line in text.decode(errors="replace").splitlines()):
            # Where a holder was killed a part of a line may have no end.
            if len(words) == 5 and all(word.isdecimal() for word in words):
                at, sent, sender, run_number, _ = map(int, words)
                yield at / 1e9, sent / 1e9, sender, run_number

    def end_containers(self):
        def end(number):
            there = {row["name"] for row in self.hosts.host(number).containers()} & {*VNICS, FLEETING}
            for name in there:
                self.end(name, number)
        list(self.pool.map(end, HOSTS))

    def close(self):
        self.recorder.stop()
        self.quick.set()
        for pool in (self.pool, self.operator):
            pool.shutdown()
        # Nobody sends to ends of former trials.
        for path in self.hosts.watched.glob("*.holder*"):
            path.unlink(missing_ok=True)


def is_floating(address):
    return ipaddress.ip_address(address) in FLOATING


def reads_of(host, audit, time_of):
    """When the router has read its peers file."""
    log = (host.run_dir / "router.log").read_text(errors="replace").splitlines()
    reads = [line.split()[0] for line in log if "peers file read" in line]
    return [time_of(text) for text in reads + [row["time"] for row in audit if row.get("what") == "begins"]]
