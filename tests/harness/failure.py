"""How a test says that something is not as it should be, or that the machine has not what it needs."""

LACKING = "this machine lacks"


class Failure(Exception):
    """Something is not as it should be; the text says what."""


def need(condition, text):
    __tracebackhide__ = True
    if not condition:
        raise Failure(text)


def skip_lacking(what):
    """For what the kernel or the machine has not. A program that is not installed is a failure: `require_commands`."""
    import pytest  # not in files that run without it

    pytest.skip(f"{LACKING} {what}")
