"""The differential suite with the peer on another host: one process, two devices, and packets between them.

What the scenarios say has to be the same as within a host, so `differences-wire.txt` lists only what differs further;
`--update` rewrites it.
"""

import pytest

from harness import differential
from harness.cases import selected


@pytest.fixture(scope="module")
def rxe():
    return differential.scenarios(differential.TRACE.read_text())


@pytest.fixture(scope="module")
def freeflow(request, lab, rxe):
    said = differential.run_over_wire(lab, selected(request, test_scenario_over_the_wire))
    if request.config.option.update:
        base, further = (differential.Table(file) for file in (differential.DIFFERENCES, differential.WIRE_DIFFERENCES))
        differential.update(further, rxe, said, base)
    return said


@pytest.fixture(scope="module")
def tables(freeflow):
    return differential.Table(differential.DIFFERENCES), differential.Table(differential.WIRE_DIFFERENCES)


@pytest.mark.parametrize("case", differential.two_sided())
def test_scenario_over_the_wire(rxe, freeflow, tables, case):
    base, further = tables
    (further if case in further.scenarios else base).check(case, rxe.get(case), freeflow.get(case))


def test_every_reason_says_who_is_right_and_why():
    differential.Table(differential.WIRE_DIFFERENCES).check_reasons()
