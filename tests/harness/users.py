"""Functions as another user of the machine."""

import os
import pickle

from harness.failure import need


def as_user(uid, group_ids, function, *arguments):
    """Result of the function in a process of that user."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            os.setgroups(group_ids)
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            try:
                result = (None, function(*arguments))
            except Exception as error:
                result = (str(error), None)
            with os.fdopen(writer, "wb") as pipe:
                pickle.dump(result, pipe)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        content = pipe.read()
    os.waitpid(child, 0)
    need(content, "the other user's process died")
    error, value = pickle.loads(content)
    need(error is None, error)
    return value


def reachable(host):
    """The run directory of a test hangs under one that is root's alone."""
    os.chmod(host.directory, 0o711)
