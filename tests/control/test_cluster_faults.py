"""Random faults of a cluster, by seed: no address is two hosts', nobody is believed who has it no more, nothing that was
declared is lost, and all hosts are equal soon after.

All seeds have one laboratory: what one leaves, the next one finds, but for its containers. Before them the checks
themselves, on histories with each of the faults.
"""

import time

import pytest

import harness
from harness import cluster_history as history
from harness.cluster_faults import STEP_HOURS, WEIGHTS, FaultyHosts, Trial, schedule, shown
from harness.cluster_history import Belief, Change, Delivery, Force, Holding, Packet
from harness.failure import need
from harness.settings import FULL, SEED

SEEDS = 200 if FULL else 20
FAULTS_SHOWN = 20
ADDRESS = "10.50.0.226"
# So soon after the last fault hosts are to be equal. Commands that wait for a vNIC may still run then, so it is said how many
# seeds took longer, and a seed fails by EQUAL_SECONDS after the last command.
EQUAL_WANTED_SECONDS = 5
totals, times = {}, []


@pytest.fixture(scope="module")
def hosts():
    harness.require_commands("etcd", "etcdctl", "openssl", "patchelf", "unshare")
    hosts = FaultyHosts()
    yield hosts
    hosts.close()


@pytest.mark.parametrize("seed", range(SEED, SEED + SEEDS))
def test_a_seed(hosts, seed):
    begin = time.monotonic()
    trial = Trial(hosts, seed)
    try:
        trial.start_traffic()
        equal = trial.wait_until_equal(trial.play())
        of_fault = time.monotonic() - trial.healed
        requests = trial.stop_traffic()
        wrong, counts = trial.check()
        need(not wrong, "\n".join([f"{len(wrong)} faults:", *wrong[:FAULTS_SHOWN]]))
        need(counts["packets"] and counts["deliveries"] and requests, f"nothing was accepted: {counts}, {requests} requests")
        trial.end_containers()
    except BaseException as failure:
        # The schedule, and what came of it.
        print(f"seed {seed}, host {trial.victim} is cut off or its router killed:\n{shown(trial.actions)}\n--- what was done:")
        print("\n".join(trial.notes))
        raise failure from None
    finally:
        trial.close()
    counts |= {"forces": sum(words[0] == "force" for _, words in trial.actions), "requests": requests}
    for key, count in counts.items():
        totals[key] = totals.get(key, 0) + count
    print(f"seed {seed}: {trial.notes_of_end()}; equal {equal:.2f} s after the last command and {of_fault:.2f} s after the last fault, "
          f"{time.monotonic() - begin:.2f} s in all, {counts}")
    times.append(of_fault)


def test_all_kinds_of_faults_were_met(hosts):
    """The seeds before did what they are for, and how much of it."""
    print(f"{totals}; hosts were equal {max(times, default=0):.2f} s after the last fault at most, "
          f"{sum(one > EQUAL_WANTED_SECONDS for one in times)} of {len(times)} seeds took more than {EQUAL_WANTED_SECONDS} s")
    need(totals.get("places", 0) > SEEDS and totals.get("forces", 0) > SEEDS // 4 and totals.get("beliefs", 0) > SEEDS
         and totals.get("stepped", 0),
         f"the seeds met little (this case runs after all of them): {totals}")


# ---- the checks find what they look for


def test_two_holders_are_found_unless_an_operator_forced_it():
    one = Holding("host1", ADDRESS, 10, 20)
    need(not history.two_holders([one, Holding("host2", ADDRESS, 20, 30)], []), "one after the other")
    need(not history.two_holders([one, Holding("host2", "10.50.0.227", 15, 30)], []), "two addresses")
    for both in (Holding("host2", ADDRESS, 19.9, 30), Holding("host2", ADDRESS, 15), Holding("host2", ADDRESS, 5, 10.1)):
        need(len(history.two_holders([one, both], [])) == 1, f"{both}")
    late = Holding("host2", ADDRESS, 15, 30)
    need(not history.two_holders([one, late], [Force(ADDRESS, "host2", 14)]), "it was forced")
    need(not history.two_holders([one, late], [Force(ADDRESS, "host2", 9, 12)]), "its command was on its way when the former host got it")
    for force in (Force(ADDRESS, "host2", 16), Force(ADDRESS, "host2", 9), Force(ADDRESS, "host1", 14), Force("10.50.0.227", "host2", 14)):
        need(len(history.two_holders([one, late], [force])) == 1, f"{force} is no excuse")
    need(len(history.two_holders([Holding("host1", ADDRESS, 10), Holding("host2", ADDRESS, 15)], [])) == 1, "both have it still")


def test_a_packet_that_is_accepted_late_is_found():
    beliefs = [Belief("host3", 10, 20, {ADDRESS: "host1"}), Belief("host3", 20, 30, {ADDRESS: "host2"}), Belief("host3", 30, 40, {})]

    def late(at, sender, by="host3"):
        return len(history.late_packets([Packet(at, by, sender, ADDRESS)], beliefs))
    need(not late(15, "host1") and not late(25, "host2") and not late(20.2, "host1"), "they are in time")
    need(not late(5, "host2") and not late(35, "host3") and not late(25, "host1", by="host2"), "nothing is known of these")
    need(not late(25, "host3"), "a router's own vNICs are not by its peers file")
    need(late(25, "host1") and late(15, "host2") and late(35, "host2"), "they are late")


def test_a_packet_that_is_sent_to_a_former_holder_is_found():
    beliefs = [Belief("host3", 10, 20, {ADDRESS: "host1"}), Belief("host3", 20, 30, {ADDRESS: "host2"}), Belief("host3", 30, 40, {})]

    def late(sent, at, to, sender="host3"):
        return len(history.late_deliveries([Delivery(sent, at, sender, to, ADDRESS)], beliefs))
    need(not late(15, 15.1, "host1") and not late(25, 25.1, "host2"), "they are right")
    need(not late(19.9, 20.6, "host2") and not late(20.2, 20.4, "host1"), "the router may go by the one file or by the other")
    need(not late(5, 5.1, "host2") and not late(25, 25.1, "host1", sender="host2"), "nothing is known of these")
    need(not late(25, 25.1, "host3"), "a router's own vNICs are not by its peers file")
    need(late(25, 25.1, "host1") and late(15, 15.1, "host2") and late(35, 35.1, "host2"), "they are late")


def test_times_of_a_stepped_clock_are_the_machines():
    need(all(history.unstepped(1234.5 + hours * 3600, 1000.0) == 1234.5 for hours in (0, *STEP_HOURS)), "a log's time is wrong")


def test_beliefs_are_what_the_router_has_read():
    versions = [(10.0, 11.0, {ADDRESS: "host1"}), (12.0, 13.0, {ADDRESS: "host2"}), (14.0, 19.0, {ADDRESS: "host3"})]
    found = history.beliefs_of("host3", versions, [10.1, 14.2, 9])
    need(found == [Belief("host3", 10.1, 11.0, {ADDRESS: "host1"}), Belief("host3", 14.2, 19.0, {ADDRESS: "host3"})], f"{found}")


def test_holdings_are_read_from_logs_of_routers_that_were_killed():
    def line(second, **fields):
        return {"time": f"1970-01-01T00:00:{second:02}.500Z", **fields}

    def vnic(second, outcome):
        return line(second, kind="Vnic", outcome=outcome, addresses=[ADDRESS])
    begins = line(20, event="router", what="begins")

    def found(present, *lines):
        return history.holdings_of("host1", lines, lambda address: True, present)
    need(found(set(), vnic(10, "created"), vnic(12, "deleted")) == [Holding("host1", ADDRESS, 10.5, 12.5)], "as noted")
    need(found({ADDRESS}, vnic(10, "created"), begins) == [Holding("host1", ADDRESS, 10.5)], "it has it still")
    # The last lines before it was killed are lost.
    need(found(set(), vnic(10, "created"), line(15), begins, line(22)) == [Holding("host1", ADDRESS, 10.5, 15.5)], "the end")
    need(found({ADDRESS}, vnic(10, "created"), line(15), begins, vnic(22, "created")) ==
         [Holding("host1", ADDRESS, 10.5, 15.5), Holding("host1", ADDRESS, 22.5)], "the end, and it has it again")
    need(found({ADDRESS}, line(15), begins) == [Holding("host1", ADDRESS, 20.5)], "the beginning")


def test_a_place_that_its_host_has_not_let_go_is_found():
    def place(revision, host, **more):
        return Change(revision, "/freeflow/places/data/alpha", {"host": host, **more})

    def word(revision, host, at, released):
        return Change(revision, f"/freeflow/hosts/{host}/data/holdings", {"vnics": {"alpha": {"at": at, "released": released}}})
    first = place(5, "host1")
    need(not history.unreleased_places([first, word(6, "host1", 5, True), place(7, "host2")], {}), "it was let go")
    need(not history.unreleased_places([first, place(7, "host2", moved=True)], {"alpha": {"host2"}}), "it was forced")
    need(not history.unreleased_places([first, place(6, "host1", next="host2")], {}), "it is where it was")
    for changes in ([first, place(7, "host2")], [first, word(6, "host1", 5, False), place(7, "host2")],
                    [first, word(6, "host1", 4, True), place(7, "host2")], [first, place(7, "host2"), word(8, "host1", 5, True)],
                    [first, word(6, "host2", 5, True), place(7, "host2")], [first, Change(7, "/freeflow/places/data/alpha", None)],
                    [first, place(7, "host2", moved=True)]):
        need(len(history.unreleased_places(changes, {"alpha": {"host3"}})) == 1, f"{changes}")


def test_a_lost_object_and_an_unequal_host_are_found():
    need(not history.lost_objects({"networks/blue": True, "vnics/alpha": None, "networks/green": False}, {"networks/blue"}), "as said")
    need(len(history.lost_objects({"networks/blue": True, "networks/green": False}, {"networks/green"})) == 2, "lost, and not gone")
    in_etcd, places = {"networks/red", "vnics/alpha"}, {"alpha": (7, {"host": "host1"})}
    right = {"host1": {"networks/red", "vnics/alpha"}, "host2": {"networks/red"}}
    need(not history.unequal_hosts(in_etcd, places, set(), right), "as they are to be")
    need(not history.unequal_hosts(in_etcd, places, {("host1", "alpha", 7)}, right | {"host1": {"networks/red"}}), "it was let go")
    for host, has in (("host1", {"networks/red"}), ("host2", set()), ("host2", in_etcd), ("host2", {"networks/red", "networks/old"})):
        need(len(history.unequal_hosts(in_etcd, places, set(), right | {host: has})) == 1, f"{host} has {has}")
    need(history.unequal_hosts(in_etcd, {"alpha": (7, {"host": "host1", "next": "host2"})}, set(), right), "it is on its way")


def test_a_seed_is_one_schedule():
    need(schedule(SEED) == schedule(SEED) != schedule(SEED + 1), "a seed has two schedules")
    met = {words[0] for seed in range(SEED, SEED + 20) for _, words in schedule(seed)[1]}
    need(set(WEIGHTS) <= met, f"twenty seeds lack {set(WEIGHTS) - met}")
