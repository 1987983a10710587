"""A Kubernetes for all tests of a file."""

import pytest

from harness.kubernetes import Kubernetes


@pytest.fixture(scope="module")
def kubernetes():
    with Kubernetes() as kubernetes:
        yield kubernetes
