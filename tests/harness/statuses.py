"""tests/programs/statuses.c: completion statuses, events and limits by the C interface."""

from harness.cases import Report
from harness.failure import need
from harness.host import in_two_containers
from harness.processes import run
from harness.programs import program
from harness.settings import PORT


def names():
    return run([program("statuses"), "list"]).split()


def in_one_process(container, cases):
    # The exit code says no more than the cases, each of which is looked at.
    return Report(container.exec(program("statuses"), "loopback", *cases, seconds=240, codes=(0, 1)))


def run_in_two(server, client, words, cases, seconds=240):
    """The outputs of both ends, the client's first; the server's `words` may begin with others."""
    server_output, output = in_two_containers(
        server, client, [*words, "server", PORT, *cases], [*words, "client", "{ip}", PORT, *cases], seconds,
        codes=(0, 1))
    return output, server_output


def in_two(server, client, cases):
    return Report(*run_in_two(server, client, [program("statuses")], cases))


def two_containers(server, client, statuses, cases=()):
    """All of them, or those with such words in their names, as one check."""
    outputs = run_in_two(server, client, [statuses], cases)
    need(all(", 0 failed" in output for output in outputs), "".join(outputs))
    return outputs[0].strip().splitlines()[-1]
