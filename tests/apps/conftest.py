"""The places where others' programs run: indirect parameters of a test, in the order in which they are made."""

import contextlib

import pytest

import harness
from harness import places


@pytest.fixture(scope="module")
def place(request):
    """Two containers; when all programs have ended, nothing is left of them in the routers."""
    with places.place(request.param) as place:
        held = [harness.router_resources(host) for host in place.hosts]
        yield place
        for host, before in zip(place.hosts, held):
            harness.wait_for_resources(host, before)


@pytest.fixture(scope="module")
def load(request, place):
    with places.Load() if request.param == "loaded" else contextlib.nullcontext():
        yield request.param
