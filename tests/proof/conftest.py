"""The subset of the proofs runs on the default model; the summary says if the full run is old."""

import pytest
from support import proof_report
from support.proof_prompts import read_prompts
from support.real_pair import default_checkpoints, real_pair

from protocol.errors import ModelNotFound


@pytest.fixture(scope="session")
def checkpoints():
    try:
        return default_checkpoints()
    except ModelNotFound as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def own_prompts(checkpoints):
    return read_prompts("own", checkpoints.model)


@pytest.fixture(scope="module")
def exact_pair(checkpoints):
    with real_pair(checkpoints, dtype="float32", exact=True) as pair:
        yield pair


@pytest.fixture(scope="module")
def plain_pair(checkpoints):
    with real_pair(checkpoints, dtype="float32", exact=False) as pair:
        yield pair


def pytest_terminal_summary(terminalreporter):
    """Not a failure: the full proofs take minutes, and a commit need not wait for them."""
    if reason := proof_report.stale():
        terminalreporter.write_line(f"note: docs/{reason}")
