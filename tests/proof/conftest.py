"""The subset of the proofs runs on the default model; the summary says if the full run is old."""

import pytest
import torch
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


@pytest.fixture(scope="session")
def threads():
    """As many as a worker may take of the cores: two that wait for each other's are very slow."""
    return torch.get_num_threads()


@pytest.fixture(scope="module")
def exact_pair(checkpoints, threads):
    with real_pair(checkpoints, dtype="float32", exact=True, threads=threads) as pair:
        yield pair


@pytest.fixture(scope="module")
def plain_pair(checkpoints, threads):
    with real_pair(checkpoints, dtype="float32", exact=False, threads=threads) as pair:
        yield pair
