"""Completion statuses, events and limits by the C interface: in one process, and between two containers.

The cases are those of tests/programs/cases_*.c.
"""

import pytest

import harness
from harness import statuses
from harness.cases import selected

CASES = statuses.names()
pytestmark = pytest.mark.usefixtures("pair", "held")


@pytest.fixture(scope="module")
def in_one_process(request, server):
    return statuses.in_one_process(server, selected(request, test_in_one_process))


@pytest.fixture(scope="module")
def in_two(request, server, client):
    return statuses.in_two(server, client, selected(request, test_between_two_containers))


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES)
def test_in_one_process(in_one_process, case):
    in_one_process.check(case)


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES)
def test_between_two_containers(in_two, case):
    in_two.check(case)


def test_nothing_is_left_in_the_router(host, held):
    harness.wait_for_resources(host, held)
