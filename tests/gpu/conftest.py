"""What needs a GPU. Without one every test here is skipped, with the reason.

Stages can be run alone: ``make gpu STAGE=ring``. They need no network and no model.
"""

import pytest

from protocol.errors import DaemonError
from protocol.transports import cuda_runtime
from protocol.transports.devices import survey


@pytest.fixture(scope="session")
def gpus():
    """Facts of every GPU; skips where there is none."""
    try:
        found, nothing = survey()
    except DaemonError as error:
        found, nothing = (), str(error)
    if not found:
        pytest.skip(f"no CUDA device: {nothing}")
    return found


@pytest.fixture
def runtime(gpus):
    """The real one, on the first GPU."""
    real = cuda_runtime.load_runtime()
    real.set_device(0)
    return real
