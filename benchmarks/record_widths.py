"""Record a trace that width policies are played on (`tests/support/width_traces.py`).

``python benchmarks/record_widths.py OUT [--acceptance] [--prices] [--prompts FILE --limit N]``

`--acceptance` decodes one token at a time and asks the draft for a whole block before each, so that
OUT says of every position how many proposals are right there, and how likely the draft found each
to be: whatever a policy does, what it would have emitted is then known. It is exact, also on a busy
machine. `--prices` times rounds
of every width, all widths in turn, and must run alone on the machine. Each keeps the other's part
of an OUT that exists.
"""

import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import decode
from draft_block import prepare
from inprocess_worker import InProcess
from measuring import machine
from measuring.prompts import Prompt, read_prompts

from draft_daemon.engine import Engine
from protocol.codec import pack_tokens, unpack_tokens
from protocol.messages import (
    CloseItem,
    IngestItem,
    OpenItem,
    PrefillItem,
    ProposeItem,
    Verdict,
    VerifyItem,
)

REPEATS = 15
MANY = 16  # feature rows of one ingest, at the rate of a probe
HAND_OVER = 0.0006  # seconds of a question and its answer: benchmarks/README.md


def right(emitted: Sequence[int], proposed: Sequence[Sequence[int]]) -> list[int]:
    """For each block, proposed behind the token of the same index: how many ids are right."""
    found = []
    for at, ids in enumerate(proposed):
        pairs = zip(ids, emitted[at + 1 :], strict=False)
        found.append(sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return found


@dataclass(frozen=True, slots=True)
class Recorded:
    """A text, and the draft's whole block after each of its tokens but the last."""

    emitted: list[int]
    proposed: list[tuple[int, ...]]
    stated: list[tuple[float, ...]]  # how likely the draft found each slot to be


class Recorder:
    """One pair in this process."""

    def __init__(self, pair: InProcess, draft: Engine, block_size: int) -> None:
        self.pair = pair
        self.draft = draft
        self.block_size = block_size
        self._sequence = 1  # `draft_block.prepare` uses it
        self._round = 10

    def decode(self, prompt: Sequence[int], max_tokens: int) -> Recorded:
        """The target's text, one token at a time."""
        self._sequence += 1
        number, target, draft = self._sequence, self.pair.engine, self.draft
        slot = target.open(OpenItem(sequence=number)).slot
        draft.open(OpenItem(sequence=number, slot=slot))
        chunk, token = self.pair.target.prefill_chunk, -1
        for start in range(0, len(prompt), chunk):
            part = pack_tokens(list(prompt[start : start + chunk]))
            last = start + chunk >= len(prompt)
            item = PrefillItem(sequence=number, start=start, tokens=part, last=last)
            token = target.prefill(item).token
            draft.ingest(IngestItem(sequence=number, stop=min(start + chunk, len(prompt))))
        found, finish = Recorded([token], [], []), ""
        emitted = found.emitted
        while not finish and len(emitted) < max_tokens:
            base = len(prompt) + len(emitted) - 1
            block = ProposeItem(
                sequence=number, base_pos=base, pending=emitted[-1], width=self.block_size
            )
            answer = draft.propose(block)
            found.proposed.append(unpack_tokens(answer.tokens))
            found.stated.append(answer.confidences)
            budget = max_tokens - len(emitted)
            verdict = self._verify(number, base, emitted[-1:], budget)
            emitted += unpack_tokens(verdict.tokens)
            finish = verdict.finish
        target.close(CloseItem(sequence=number))
        draft.close(CloseItem(sequence=number))
        return found

    def _verify(self, sequence: int, base: int, block: Sequence[int], budget: int) -> Verdict:
        self._round += 1  # one that was seen before would be answered without computing
        return self.pair.engine.verify(
            VerifyItem(
                sequence=sequence,
                round=self._round,
                base_pos=base,
                tokens=pack_tokens(list(block)),
                budget=budget,
            )
        )

    def prices(self) -> dict[str, Any]:
        """Median seconds by rows, after `draft_block.CONTEXT` positions."""
        pending = prepare(self.pair, self.draft)
        widths = range(1, self.block_size + 1)
        verify: dict[int, list[float]] = {width: [] for width in widths}
        block: dict[int, list[float]] = {width: [] for width in widths if width > 1}
        ingest: list[float] = []
        more: list[float] = []
        base = 200
        for _ in range(REPEATS):
            for width in widths:
                verdict = self._verify(1, base, [pending, *[0] * (width - 1)], self.block_size)
                verify[width].append(verdict.seconds)
                base, pending = verdict.committed, unpack_tokens(verdict.tokens)[-1]
                if width > 1:
                    item = ProposeItem(sequence=1, base_pos=base, pending=pending, width=width)
                    answer = self.draft.propose(item)
                    block[width].append(answer.draft_seconds)
                    ingest.append(answer.ingest_seconds)
            for _ in range(MANY - 1):  # a probe takes in all rows since the last one at once
                verdict = self._verify(1, base, [pending], self.block_size)
                base, pending = verdict.committed, unpack_tokens(verdict.tokens)[-1]
            item = ProposeItem(sequence=1, base_pos=base, pending=pending, width=2)
            more.append(self.draft.propose(item).ingest_seconds)
        one = statistics.median(ingest)
        return {
            "verify": [statistics.median(times) for times in verify.values()],
            "draft": [0.0, *(statistics.median(times) for times in block.values())],
            "ingest_row": one,
            "ingest_more": max(0.0, statistics.median(more) / one - 1) / (MANY - 1),
            "hand_over": HAND_OVER,
        }


def acceptance(
    recorder: Recorder, prompts: Sequence[Prompt], max_tokens: int
) -> dict[str, list[Any]]:
    """Of every position of every text: how many are right, and what is stated, in percent."""
    texts: dict[str, list[Any]] = {"texts": [], "right": [], "stated": []}
    for prompt in prompts:
        began = time.perf_counter()
        text = recorder.decode(prompt.ids, max_tokens)
        texts["texts"].append(prompt.name)
        texts["right"].append(right(text.emitted, text.proposed))
        texts["stated"].append([[round(100 * one) for one in block] for block in text.stated])
        seconds = time.perf_counter() - began
        decode.say(f"{prompt.name}: {len(text.proposed)} positions, {seconds:.0f} s")
    return texts


def main(arguments: Sequence[str]) -> int:
    """Record what was asked for."""
    parser = decode.common_options(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--acceptance", action="store_true")
    parser.add_argument("--prices", action="store_true")
    options = parser.parse_args(arguments)
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    plan = decode.plan_of(options)
    prompts, stops = read_prompts(options.prompts, Path(plan.model), options.limit)
    pair = InProcess(plan, tuple(stops))
    if pair.draft is None:
        raise SystemExit("a trace needs a draft")
    facts = pair.network.config
    recorder = Recorder(pair, pair.draft, facts.max_proposals + 1)
    found |= {"name": options.out.stem, "block_size": recorder.block_size}
    if options.acceptance:
        found |= {"acceptance_of": machine.describe()}
        found |= acceptance(recorder, prompts, options.max_tokens)
    if options.prices:
        found |= {"prices_of": machine.describe(), "prices": recorder.prices()}
    options.out.write_text(json.dumps(found, separators=(",", ":")) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
