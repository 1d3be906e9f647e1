"""Driving real children as the supervisor's loop does."""

import select
import time


def events_until(child, kind, *, seconds=60.0):
    """All events of the child up to and including the first of `kind`, as a loop would get them."""
    deadline = time.monotonic() + seconds
    found = []
    while not any(isinstance(event, kind) for event in found):
        assert time.monotonic() < deadline, f"no {kind} among {found}"
        poller = select.poll()
        for fd in child.fds:
            poller.register(fd, select.POLLIN)
        for fd, _ in poller.poll(50):
            if fd in child.fds:
                found += child.on_readable(fd)
        found += child.on_deadline()
    return found
