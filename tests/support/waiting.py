"""Waiting in tests is polling with a deadline."""

import time


def until(condition, *, seconds=30.0, what="the condition"):
    """Call `condition` until it is true and return what it returned."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true within {seconds} s")
        time.sleep(0.005)
    return found
