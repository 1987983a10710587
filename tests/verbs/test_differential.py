"""The differential suite: FreeFlow's trace of each scenario against that of Linux's Soft-RoCE.

A scenario passes if its difference is exactly the listed one, most often none: both a difference that is not listed and
a listed one that is gone fail. `--update` rewrites the list to what is; a scenario with a new difference gets the
reason `unreviewed`, with which the test fails until a person has written a better one. The peers on another host:
tests/wire/test_differential_over_wire.py.
"""

import pytest

from harness import differential
from harness.cases import selected


@pytest.fixture(scope="module")
def rxe():
    return differential.scenarios(differential.TRACE.read_text())


@pytest.fixture(scope="module")
def freeflow(request, container, rxe):
    """Answers of the chosen scenarios here, in one run; with --update the list becomes these."""
    cases = selected(request, test_scenario)
    said = differential.run_on_freeflow(container, cases)
    if request.config.option.update:
        differential.update(differential.Table(differential.DIFFERENCES), rxe, said)
    return said


@pytest.fixture(scope="module")
def table(freeflow):
    return differential.Table(differential.DIFFERENCES)


@pytest.mark.sampled
@pytest.mark.parametrize("case", differential.names())
def test_scenario(rxe, freeflow, table, case):
    table.check(case, rxe.get(case), freeflow.get(case))


def test_every_reason_says_who_is_right_and_why():
    differential.Table(differential.DIFFERENCES).check_reasons()
