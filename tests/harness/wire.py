"""Programs between two hosts of a lab."""

from harness.failure import need
from harness.host import in_two_containers
from harness.programs import program
from harness.settings import PORT


def patient(words):
    """With a timeout of a second: the other host's router may have no processor for longer than perftest's own."""
    return words if {"-R", "UD", "UC"} & set(words) else [*words, "-u", "18"]


def model(server, client, *options):
    """Random requests both ways against a model of the memory."""
    wire = program("wire")
    _, output = in_two_containers(server, client, [wire, *options, "server", PORT],
                                      [wire, *options, "client", "{ip}", PORT])
    need("all right" in output, output)
    return output.strip().splitlines()[-1]


def went_through_packets(host):
    """Else this stage would show nothing."""
    status = host.wire()
    need(status["counters"].get("packets_sent", 0) > 10000 and status["counters"].get("packets_received", 0) > 10000,
         f"the wire carried next to nothing: {status['counters']}")
    need("bad_icrc" not in status["counters"] and "malformed" not in status["drops"],
         f"routers do not understand each other: {status['counters']}, {status['drops']}")
