"""Both engines in one process, driven by the same session: no codec, socket or shared memory.

Started by `decode.py`. The settings are those of `launch.plan.Plan`, so that the engines are built
from the very configs that daemons would get.
"""

import itertools
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch
from measuring.answer import Job, answer_jobs
from measuring.modes import round_of

from draft_daemon.checkpoint import load_draft
from draft_daemon.engine import Engine as DraftEngine
from launch.events import TargetFacts
from launch.inprocess import run_spec_decode
from launch.plan import Plan
from launch.policy import FULL
from launch.prepare import prepare
from launch.token_ids import unpack_ids
from protocol.config import RING_SOCKET, DraftConfig
from protocol.cpu import usable_cores
from protocol.messages import Piece, Sampling
from protocol.transports.local import TRANSPORT
from target_daemon.checks import Limits
from target_daemon.engine import Engine as TargetEngine
from target_daemon.families.base import NativeTarget, load_target
from target_daemon.rollback import settle

LIFE, NONCE = 1, 1


class InProcess:
    """The pair, loaded."""

    def __init__(self, plan: Plan, stops: tuple[int, ...]) -> None:
        place = Path(f"/in-process/{os.getpid()}")  # a key, never a folder
        prepared = prepare(plan, place)
        torch.set_num_threads(plan.threads or usable_cores())
        host = TRANSPORT.host(place)
        self.target = load_target(prepared.target, host)
        host.offer(NONCE, LIFE)
        way = settle(self.target, plan.rollback)
        limits = Limits(self.target.prefill_chunk, self.target.max_width, way.kind)
        self.engine = TargetEngine(self.target, limits, self.target.ring)
        self.draft = self._load_draft(place, prepared.draft)
        self._block = prepared.target.block_size
        self._context = plan.draft_context
        self._sampling = Sampling(stop_token_ids=stops)
        self._sequences = 0

    def _load_draft(self, place: Path, config: DraftConfig | None) -> DraftEngine | None:
        if config is None:
            return None
        guest = TRANSPORT.attach(
            str(place / RING_SOCKET),
            nonce=NONCE,
            life=LIFE,
            shape=self.target.ring.shape,
            timeout=1.0,
        )
        self.network = load_draft(Path(config.draft), self.target.dtype, vocab=config.vocab)
        draft = DraftEngine(
            self.network,
            guest,
            vocab_size=self.target.vocab_size,
            slots=config.slots,
            context_window=config.context_window,
            max_ingest=config.max_ingest,
        )
        draft.warm_up()
        return draft

    def generate(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """One prompt; rounds are timed from emission to emission, as with daemons."""
        self._sequences += 1
        pieces: list[tuple[Piece, float]] = []
        began = time.perf_counter()
        result = run_spec_decode(
            self.engine,
            self.draft,
            prompt,
            max_tokens,
            facts=_facts(self.target),
            block_size=self._block,
            draft_context=self._context,
            block_width=FULL,
            sampling=self._sampling,
            on_piece=lambda piece: pieces.append((piece, time.perf_counter())),
            sequence=self._sequences,
        )
        first, last = pieces[0][1], pieces[-1][1]
        pairs = itertools.pairwise(pieces)
        rounds = [asdict(round_of(piece, now - before)) for (_, before), (piece, now) in pairs]
        ids = [token for piece, _ in pieces for token in unpack_ids(piece.tokens)]
        assert tuple(ids) == result.token_ids
        return {"ids": ids, "first": first - began, "total": last - began, "rounds": rounds}


def _facts(target: NativeTarget) -> TargetFacts:
    return TargetFacts(
        LIFE,
        target.vocab_size,
        target.max_positions,
        target.prefill_chunk,
        target.ring.shape.capacity,
        target.max_width,
        target.exactness.kind,
    )


def start(settings: dict[str, Any]) -> tuple[dict[str, Any], Job]:
    """Load the pair that `settings` ask for."""
    pair = InProcess(msgspec.convert(settings["plan"], Plan), tuple(settings["stops"]))
    dtype = str(pair.target.dtype).removeprefix("torch.")
    return {"dtype": dtype, "exact": pair.target.exactness.kind}, pair.generate


if __name__ == "__main__":
    answer_jobs(start)
