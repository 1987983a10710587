"""What hosts of a cluster did, against what they might do: histories of a run, and the faults in them.

All of it is plain data, so that made-up histories can show that each fault is found. Times are seconds of Unix time, by
the machine's one clock.
"""

import dataclasses
import json
from datetime import datetime

# Of two logs' lines: they have milliseconds.
LOG_SECONDS = 0.02
# Clocks are stepped by multiples of it, which is more than a run of all trials takes.
STEP_UNIT_S = 6 * 3600
# From a router's line that it has read its peers file until the last packet that it had taken before is seen.
PACKET_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Holding:
    """A host's router has an address of a declared vNIC; `end` is None where it has it still."""
    host: str
    address: str
    begin: float
    end: float | None = None


@dataclasses.dataclass(frozen=True)
class Force:
    """An operator was about to take an address away from whoever has it, for a host."""
    address: str
    to: str
    at: float
    # When its command had ended; it has done its part at some time until then.
    ended: float = 0.0


@dataclasses.dataclass(frozen=True)
class Belief:
    """In this time a host's router went by a peers file that has these addresses of others."""
    host: str
    begin: float
    end: float
    holders: dict


@dataclasses.dataclass(frozen=True)
class Packet:
    """A host's router has accepted a packet under an address, and its sender says on which host it runs."""
    at: float
    by: str
    sender: str
    address: str


@dataclasses.dataclass(frozen=True)
class Delivery:
    """A holder of an address on a host was given a packet that was sent to the address on another one."""
    sent: float
    at: float
    sender: str
    to: str
    address: str


@dataclasses.dataclass(frozen=True)
class Change:
    """Of a key of etcd's, at a revision; None: it was deleted."""
    revision: int
    key: str
    value: dict | None


# ---- histories from logs


def log_time(text):
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def unstepped(at, began):
    """The machine's time, since `began`, of one that a stepped clock has given."""
    return began + (at - began) % STEP_UNIT_S


def holdings_of(host, audit, floating, present, time_of=log_time):
    """From the lines of an audit log. A router that is killed may lose its last ones: what it then had, or has not, at
    the end (`present`) is as if it had been noted with the last line before. `floating` chooses addresses."""
    began, found, last, router = {}, [], 0.0, 0.0

    def end(address, at):
        found.append(Holding(host, address, began.pop(address), at))
    kept = {}
    for row in audit:
        at = time_of(row["time"])
        if row.get("event") == "router" and row.get("what") == "begins":
            kept, router = {address: last for address in began}, at
        if row.get("kind") == "Vnic" and row.get("outcome") in ("created", "deleted"):
            for address in filter(floating, row.get("addresses", ())):
                if row["outcome"] == "created":
                    if address in began:
                        end(address, kept.get(address, began[address]))
                    began[address] = at
                    kept.pop(address, None)
                elif address in began:
                    end(address, at)
                else:
                    found.append(Holding(host, address, last, at))
        last = at
    for address in list(began):
        if address not in present:
            end(address, kept.get(address, last))
    began |= {address: router for address in present if address not in began}
    return found + [Holding(host, address, begin) for address, begin in began.items()]


def beliefs_of(host, versions, reads):
    """From the times at which versions of a peers file were written, and those at which the router has read it. The
    last version ends when it was last looked at: `versions` are (written, last seen, holders)."""
    found = []
    for number, (written, seen, holders) in enumerate(versions):
        end = versions[number + 1][0] if number + 1 < len(versions) else seen
        read = next((at for at in sorted(reads) if written <= at < end), None)
        if read is not None:
            found.append(Belief(host, read, min(end, seen), holders))
    return found


# ---- faults


def two_holders(holdings, forces):
    """Addresses that two hosts had at once, though no operator had taken it from the first one."""
    wrong = []
    ordered = sorted(holdings, key=lambda one: one.begin)
    for number, old in enumerate(ordered):
        for new in ordered[number + 1:]:
            is_both = new.address == old.address and new.host != old.host
            if not is_both or (old.end is not None and old.end <= new.begin + LOG_SECONDS):
                continue
            forced = any(force.address == old.address and force.to != old.host and force.at <= new.begin
                         and max(force.at, force.ended) >= old.begin - LOG_SECONDS for force in forces)
            if not forced:
                wrong.append(f"{old.address} is {new.host}'s since {new.begin:.3f} and was {old.host}'s from {old.begin:.3f} "
                             f"until {old.end and round(old.end, 3)}")
    return wrong


def late_packets(packets, beliefs):
    """Packets under an address that were accepted from a host by the router of another one, whose peers file gave it to
    a third one, or to nobody, by then. A router goes by its own vNICs before its peers file, and a follower makes them
    before it writes that, so packets within a host say nothing: `two_holders` looks at their vNICs."""
    wrong = []
    for packet in packets:
        if packet.sender == packet.by:
            continue
        for belief in beliefs:
            if belief.host != packet.by or not belief.begin + PACKET_SECONDS < packet.at < belief.end:
                continue
            holder = belief.holders.get(packet.address)
            # A host's peers file has not what is its own.
            if holder != packet.sender:
                wrong.append(f"{packet.by} accepted {packet.address} from {packet.sender} at {packet.at:.3f}; since {belief.begin:.3f} "
                             f"it knew that it is {holder or 'none of its peers'}'s")
    return wrong


def late_deliveries(deliveries, beliefs):
    """Packets to an address that a host's router has sent to a holder that was, by its peers file, the holder no more.
    While the packet was under way the router read no other one, so it went by this."""
    wrong = []
    for one in deliveries:
        if one.sender == one.to:
            continue
        for belief in beliefs:
            holder = belief.holders.get(one.address)
            is_then = belief.host == one.sender and belief.begin + PACKET_SECONDS < one.sent and one.at < belief.end
            if is_then and holder != one.to:
                wrong.append(f"{one.sender} sent {one.address} to {one.to} at {one.sent:.3f}; since {belief.begin:.3f} it knew that it is "
                             f"{holder or 'none of its peers'}'s")
    return wrong


def unreleased_places(changes, forces_to):
    """Places that etcd has had, by which a vNIC went to another host though the former one has not let it go.
    `forces_to`: the hosts to which operators were about to force each vNIC."""
    wrong, places, released = [], {}, set()
    for change in changes:
        _, _, rest = change.key.partition("/freeflow/")
        part, _, name = rest.partition("/data/")
        if part.startswith("hosts/") and name == "holdings" and change.value:
            host = part.removeprefix("hosts/")
            released |= {(host, vnic, held["at"]) for vnic, held in change.value.get("vnics", {}).items() if held.get("released")}
        if part != "places" or name == "serial":
            continue
        before, places[name] = places.get(name), change
        if before is None or before.value is None:
            continue
        from_host, to_host = before.value["host"], (change.value or {}).get("host")
        if from_host == to_host or (from_host, name, before.revision) in released:
            continue
        if not (to_host and to_host in forces_to.get(name, ()) and change.value.get("moved")):
            wrong.append(f"the place of {name} went from {from_host} (revision {before.revision}) to {to_host} "
                         f"({change.revision}), and {from_host} had not let it go")
    return wrong


def lost_objects(wanted, in_etcd):
    """Objects that an operator was told are declared, and are not, or the other way round. `wanted`: True, False, or
    None where the operator was told that it may be either."""
    wrong = [f"{name} was declared and is lost" for name, so in wanted.items() if so is True and name not in in_etcd]
    return wrong + [f"{name} was deleted and is there" for name, so in wanted.items() if so is False and name in in_etcd]


def unequal_hosts(in_etcd, places, released, on_hosts):
    """Hosts that have not what etcd has: `in_etcd` and each of `on_hosts` are sets of `kind/name`, and vNICs are at
    their place and nowhere else."""
    wrong = []
    of_all = {name for name in in_etcd if not name.startswith("vnics/")}
    for host, has in on_hosts.items():
        here = {f"vnics/{name}" for name, (at, place) in places.items()
                if place["host"] == host and f"vnics/{name}" in in_etcd and (host, name, at) not in released}
        if has != of_all | here:
            wrong.append(f"{host} lacks {sorted((of_all | here) - has)} and has {sorted(has - of_all - here)} besides")
    wrong += [f"{name} is on its way to {place['next']}" for name, (_, place) in places.items() if place.get("next")]
    return wrong


def lines_of(path):
    """The lines of a log of JSON that are whole, with those of the file before it."""
    found = []
    for file in (path.with_name(f"{path.name}.1"), path):
        for line in file.read_text().splitlines() if file.exists() else ():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue  # it was being written when its router was killed
    return found
