"""Standard output as a place for lines alone."""

import os


def keep_standard_output() -> int:
    """A descriptor of its own for lines; whatever is printed from now on goes to standard error."""
    kept = os.dup(1)
    os.dup2(2, 1)
    return kept
