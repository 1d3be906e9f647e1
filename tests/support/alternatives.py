"""An exact tiny target in this process, and a draft that knows its text and states alternatives."""

import random
from bisect import bisect
from dataclasses import dataclass, field

from support.plain_host import PlainHost
from support.targets import load

from launch.events import TargetFacts
from launch.inprocess import run_spec_decode
from launch.token_ids import pack_ids
from protocol.errors import InternalError
from protocol.messages import (
    ClosedItem,
    IngestedItem,
    OpenedItem,
    ProposedItem,
    Sampling,
)
from target_daemon.checks import Limits
from target_daemon.engine import Engine

VOCAB, CHUNK, WIDEST, BLOCK, TOKENS = 97, 16, 12, 6, 30
PROMPT = [(5 * i * i + 3) % VOCAB for i in range(19)]
COLD = Sampling()
WARM = Sampling(temperature=0.9, top_p=0.95, seed=3, repetition_penalty=1.1, presence_penalty=0.2)


@dataclass
class Alternatives:
    """A draft that knows the text: the right token is its best, its second, or nowhere."""

    text: list[int]
    seed: int = 0
    first: float = 0.5  # how often the right token is its best one
    among: float = 0.4  # and how often it is another of its alternatives
    lives: int = 10**9
    source: random.Random = field(init=False)

    def __post_init__(self):
        self.source = random.Random(self.seed)

    def open(self, item):
        return OpenedItem(sequence=item.sequence, round=item.round, slot=item.slot)

    def ingest(self, item):
        return IngestedItem(
            sequence=item.sequence, round=item.round, start=0, stop=item.stop, seconds=0.0
        )

    def close(self, item):
        return ClosedItem(sequence=item.sequence, round=item.round, committed=0)

    def propose(self, item):
        self.lives -= 1
        if self.lives < 0:
            raise InternalError("it died")
        done = item.base_pos + 1 - len(PROMPT)
        few, ids = max(1, item.top_k), []
        for at in range(done, done + item.width - 1):
            right = self.text[at] if at < len(self.text) else 0
            slot = [token for token in self.source.sample(range(VOCAB), few + 1) if token != right]
            place = bisect([self.first, self.first + self.among], self.source.random())
            if place < 2:  # else it stands nowhere
                slot.insert(place, right)
            ids += slot[:few]
        logprobs = [-0.7 - 0.3 * rank for rank in range(few)] * (item.width - 1)
        top = {"top_ids": pack_ids(ids), "top_logprobs": tuple(logprobs)} if item.top_k else {}
        return ProposedItem(
            sequence=item.sequence,
            round=item.round,
            tokens=pack_ids(ids[::few]),
            context_rows=0,
            draft_seconds=0.0,
            ingest_seconds=0.0,
            **top,
        )


@dataclass
class Pair:
    target: object
    engine: Engine
    facts: TargetFacts
    sequence: int = 0
    texts: dict = field(default_factory=dict)

    def run(self, draft=None, *, tokens=TOKENS, sampling=COLD, **options):
        self.sequence += 1
        return run_spec_decode(
            self.engine,
            draft,
            PROMPT,
            tokens,
            facts=self.facts,
            top_k=8,
            sampling=sampling,
            sequence=self.sequence,
            **({"block_size": BLOCK, "tree_budget": WIDEST - 1} | options),
        )

    def alone(self, sampling=COLD):
        key = repr(sampling)
        if key not in self.texts:
            self.texts[key] = self.run(sampling=sampling, tokens=2 * TOKENS).token_ids
        return list(self.texts[key])


def pair_over(folder, **changes):
    host = PlainHost()
    settings = {"block_size": WIDEST, "prefill_chunk": CHUNK, "exact": True} | changes
    target = load(folder, host, **settings)
    facts = TargetFacts(
        1,
        target.vocab_size,
        target.max_positions,
        CHUNK,
        target.ring.shape.capacity,
        WIDEST,
        tree_verify=target.supports_tree_verify,
        tree_detail=target.tree_detail,
    )
    return Pair(target, Engine(target, Limits(CHUNK, WIDEST), target.ring), facts)


def tree(draft_text, **luck):
    return Alternatives(list(draft_text), **luck)
