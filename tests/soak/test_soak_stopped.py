"""The default model with its draft stopped: how long the text pauses, and when drafts come back."""

import itertools
import os
import signal
import time
from dataclasses import dataclass, field

import pytest
from support.proof_prompts import read_prompts
from support.real_pair import default_checkpoints
from support.reliability import record
from support.supervised import Client

from launch.plan import Plan
from launch.supervisor import Supervisor
from protocol.errors import ModelNotFound
from protocol.messages import Sampling

pytestmark = pytest.mark.soak
TOKENS, BEFORE = 4000, 40  # the second: pieces before the draft is stopped
LONGEST_GAP, BACK_WITHIN = 0.5, 10.0  # seconds


@dataclass
class Timed(Client):
    """Notes when each piece came, and whether its block had proposals."""

    times: list[tuple[float, bool]] = field(default_factory=list)
    stopped: float = 0.0

    def _take(self, message):
        super()._take(message)
        if self.pieces and message is self.pieces[-1]:
            self.times.append((time.monotonic(), bool(message.proposed)))

    def after(self):
        """Those that came since the draft was stopped."""
        return [(when, proposed) for when, proposed in self.times if when >= self.stopped]

    def back(self):
        """When the first block with proposals came behind one without; or nothing."""
        missed = False
        for when, proposed in self.after():
            if missed and proposed:
                return when
            missed = missed or not proposed
        return None


def test_a_stopped_draft_costs_the_text_no_half_second_and_is_back_within_ten(runtime_dir):
    try:
        pair = default_checkpoints()
    except ModelNotFound as error:
        pytest.skip(str(error))
    prompt = read_prompts("own", pair.model)[0]
    with Supervisor(Plan(model=str(pair.model), draft=str(pair.draft))) as supervisor:
        supervisor.wait_ready()
        endless = Sampling(ignore_eos=True)
        client = Timed(supervisor, 1).submit(prompt.ids, TOKENS, sampling=endless)
        supervisor.run_until(lambda: len(client.pieces) >= BEFORE)
        os.kill(supervisor.describe().draft.pid, signal.SIGSTOP)
        client.stopped = time.monotonic()
        supervisor.run_until(lambda: client.back() or client.done)
        client.cancel()
        client.finish()
        status = supervisor.describe()
    moments = [client.stopped, *(when for when, _ in client.after())]
    gap = max(later - one for one, later in itertools.pairwise(moments))
    back = client.back() - client.stopped
    figures = {"longest gap seconds": round(gap, 3), "drafts back after seconds": round(back, 3)}
    record("a stopped draft", figures | {"tokens": len(client.tokens)})
    assert (status.num_draft_restarts, status.num_target_restarts) == (1, 0)
    assert gap <= LONGEST_GAP
    assert back <= BACK_WITHIN
