"""How often a draft is right at a temperature, by the way in which it proposes. No clock is read.

``python benchmarks/coupling.py [--prompts FILE] [--limit N] [--max-tokens N] [--json OUT]``

The target's text of a seed does not depend on the draft. So each text is made once, the draft's
block is run at every one of its positions, and every way of proposing is walked over the same text:
`best id`; `coupled` at parts of the temperature, with the target's noise; `chosen online`, what
`launch.coupling` makes of these; `independent`, samples with another seed; and `rejection`, the
acceptance of full rejection sampling, ``sum(min(p, q))`` at each slot, from the distributions.
"""

import itertools
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import decode
import torch
from inprocess_worker import InProcess
from measuring import machine
from measuring.prompts import read_prompts
from torch import Tensor

from draft_daemon.chosen import Chosen
from draft_daemon.engine import Engine
from launch.coupling import PARTS, Coupling
from protocol.checkpoints.draft_vocab import ALL
from protocol.choice import choose
from protocol.codec import pack_tokens, unpack_tokens
from protocol.messages import (
    CloseItem,
    OpenItem,
    PrefillItem,
    ProposeItem,
    Sampling,
    VerifyItem,
)

TEMPERATURES: Final = (0.7, 1.0)
SEED, OTHER = 100, 9_999
REPEATS: Final = 20  # of the walk whose acceptance is drawn
NOTHING: Final = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Place:
    """One position of a text: what follows it, what is proposed there, and what would be kept."""

    truth: tuple[int, ...]
    coupled: tuple[tuple[int, ...], ...]  # for each of `PARTS`
    independent: tuple[int, ...]
    overlap: tuple[float, ...]  # sum(min(p, q)) at each slot


class Recorder:
    """Stands in for the draft's lexicon, and keeps the scores of its last block."""

    def __init__(self, draft: Engine, widest: int, tokens: int) -> None:
        self._lexicon = draft._lexicon  # noqa: SLF001 -- what nothing but a measurement needs
        self.scores = torch.empty(0)
        self.widest, self.tokens = widest, tokens  # rows of the draft's whole block; of a text
        draft._lexicon = self  # noqa: SLF001 -- the same

    def embed(self, ids: Tensor) -> Tensor:
        return self._lexicon.embed(ids)

    def best(self, hidden: Tensor) -> Chosen:
        head = self._lexicon.head
        self.scores = head(hidden.to(head.weight.dtype)).float()
        return self._lexicon.best(hidden)

    drawn = best


@torch.inference_mode()
def places(
    pair: InProcess, recorder: Recorder, number: int, prompt: Sequence[int], sampling: Sampling
) -> list[Place]:
    """Make the target's text, and look at every position of it."""
    engine, draft, start = pair.engine, pair.draft, len(prompt)
    assert draft is not None
    slot = engine.open(OpenItem(sequence=number, sampling=sampling)).slot
    draft.open(OpenItem(sequence=number, slot=slot))
    chunk = pair.target.prefill_chunk
    text: list[int] = []
    for at in range(0, start, chunk):
        part = pack_tokens(prompt[at : at + chunk])
        item = PrefillItem(sequence=number, start=at, tokens=part, last=at + chunk >= start)
        text = [engine.prefill(item).token]
    scores, widest, finish = [], recorder.widest, ""
    while not finish:
        base, left = start + len(text) - 1, recorder.tokens - len(text)
        draft.propose(ProposeItem(sequence=number, base_pos=base, pending=text[-1], width=widest))
        scores.append(recorder.scores)
        block = pack_tokens(text[-1:])
        verdict = engine.verify(
            VerifyItem(sequence=number, round=len(text), base_pos=base, tokens=block, budget=left)
        )
        text += unpack_tokens(verdict.tokens)
        finish = verdict.finish
    rows = pair.target.verify_batch(slot, torch.tensor(text), start, "all")
    assert rows is not None
    engine.close(CloseItem(sequence=number))
    draft.close(CloseItem(sequence=number))
    return [_place(text, start, j, scores[j], rows[j:], sampling) for j in range(len(text) - 1)]


def _place(
    text: list[int], start: int, j: int, scores: Tensor, rows: Tensor, sampling: Sampling
) -> Place:
    truth = tuple(text[j + 1 : j + 1 + len(scores)])
    ours, theirs = scores[: len(truth)], rows[: len(truth)]
    heat = sampling.temperature

    def drawn(temperature: float, seed: int) -> tuple[int, ...]:
        choice = Sampling(temperature=temperature, seed=seed)
        return tuple(choose(ours, start + j + 1, choice, NOTHING).tolist())

    overlap = torch.minimum((ours / heat).softmax(-1), (theirs / heat).softmax(-1)).sum(-1)
    return Place(
        truth,
        tuple(drawn(part * heat, sampling.seed) for part in PARTS),
        drawn(heat, sampling.seed + OTHER),
        tuple(overlap.tolist()),
    )


def walk(texts: Sequence[Sequence[Place]], accepted: Callable[[Place], int]) -> tuple[int, int]:
    """Tokens and rounds over all texts, if a round at a place accepts so many proposals."""
    tokens = rounds = 0
    for text in texts:
        at = 0
        while at < len(text):
            kept = accepted(text[at]) + 1
            tokens, rounds, at = tokens + kept, rounds + 1, at + kept
    return tokens, rounds


def right(offered: Sequence[int], place: Place) -> int:
    """How many of `offered` are accepted."""
    pairs = zip(offered, place.truth, strict=True)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), len(place.truth))


def online(coupling: Coupling, place: Place) -> int:
    """A round of the product's own chooser."""
    parts = coupling.parts(len(place.truth))
    offered = [place.coupled[part][slot] for slot, part in enumerate(parts)]
    kept = right(offered, place)
    coupling.note(parts, offered, place.truth[: kept + 1])
    return kept


def drawn_run(chance: random.Random, place: Place) -> int:
    """A round of rejection sampling: each slot is kept with the probability that it would have."""
    draws = (chance.random() < overlap for overlap in place.overlap)
    return next((slot for slot, kept in enumerate(draws) if not kept), len(place.overlap))


def table(texts: Sequence[Sequence[Place]]) -> dict[str, tuple[float, float]]:
    """Tokens a round, and how often the first slot is right, for each way."""
    every = [place for text in texts for place in text]
    ways: dict[str, Callable[[Place], int]] = {}
    for index, part in enumerate(PARTS):
        name = f"coupled at {part:g} of the temperature" if part else "best id"
        ways[name] = lambda place, index=index: right(place.coupled[index], place)
    ways["independent"] = lambda place: right(place.independent, place)
    found = {}
    for name, way in ways.items():
        first = sum(way(place) > 0 for place in every) / len(every)
        found[name] = (_ratio(*walk(texts, way)), first)
    coupling, firsts = Coupling(), []

    def learn(place: Place) -> int:
        firsts.append(kept := online(coupling, place))
        return kept

    length = _ratio(*walk(texts, learn))
    found["chosen online"] = (length, sum(kept > 0 for kept in firsts) / len(firsts))
    chance = random.Random(0)  # noqa: S311 -- a simulation, to be repeated
    drawn = walk(list(texts) * REPEATS, lambda place: drawn_run(chance, place))
    kept = sum(place.overlap[0] for place in every) / len(every)
    found["rejection sampling, from the distributions"] = (_ratio(*drawn), kept)
    return found


def _ratio(tokens: int, rounds: int) -> float:
    return tokens / rounds


def main(arguments: Sequence[str]) -> int:
    """Record, walk, print, and write."""
    options = decode.parse(arguments)
    options.draft_vocab = ALL  # every id's score is looked at
    plan = decode.plan_of(options)
    prompts, stops = read_prompts(options.prompts, Path(plan.model), options.limit)
    pair = InProcess(plan, tuple(stops))
    if pair.draft is None:
        raise SystemExit("this model has no draft; say --draft FOLDER")
    widest = pair.network.config.max_proposals + 1
    recorder, numbers = Recorder(pair.draft, widest, options.max_tokens), itertools.count(1)
    report = {}
    for heat in TEMPERATURES:
        texts = []
        for index, prompt in enumerate(prompts):
            sampling = Sampling(temperature=heat, seed=SEED + index, stop_token_ids=tuple(stops))
            number = next(numbers)
            texts.append(places(pair, recorder, number, prompt.ids, sampling))
            sys.stderr.write(f"temperature {heat}: {index + 1}/{len(prompts)} {prompt.name}\n")
        report[str(heat)] = table(texts)
    for heat, rows in report.items():
        sys.stdout.write(f"temperature {heat}: tokens a round, first slot right (online: rounds)\n")
        for name, (length, first) in rows.items():
            sys.stdout.write(f"  {name:45} {length:.3f}  {first:.3f}\n")
    if options.json:
        text = json.dumps(
            {"machine": machine.describe(), "prompts": len(prompts), **report}, indent=1
        )
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
