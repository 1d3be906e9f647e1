"""What ``--draft-vocab N`` costs in acceptance and gains in time.

``python benchmarks/draft_vocab.py [--acceptance] [--times] [--list FILE] --json OUT``

`--acceptance` decodes one token at a time, asks the draft for a whole block before each, and scores
the same hidden rows with all ids and with the first 4,096, 8,192 and 16,384 of the list: exact,
also on a busy machine. Tokens a round are those of rounds of full width over these positions.
`--times` times whole blocks with each head in turn, and must run alone on the machine. Each keeps
the other's part of an OUT that exists.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import decode
import torch
from draft_block import CONTEXT, prepare
from inprocess_worker import InProcess
from measuring import machine
from measuring.prompts import read_prompts
from record_widths import Recorder, right
from torch import Tensor

from draft_daemon.chosen import Chosen
from draft_daemon.engine import Engine
from draft_daemon.head import Borrowed
from launch.plan import Plan
from protocol.checkpoints.draft_vocab import ALL, LIST
from protocol.messages import ProposeItem

SIZES: Final = (4096, 8192, 16384)
REPEATS: Final = 25


def tokens_a_round(texts: Sequence[Sequence[int]]) -> float:
    """Tokens emitted by a round of full width, over all texts."""
    emitted = rounds = 0
    for text in texts:
        at = 0
        while at < len(text):
            emitted += text[at] + 1
            rounds += 1
            at += text[at] + 1
    return emitted / rounds


def acceptance(
    recorder: Recorder, head: Borrowed, ids: Sequence[int], prompts: Any, max_tokens: int
) -> dict[str, list[list[int]]]:
    """For each size and text: how many proposals of a whole block are right at each position."""
    subsets = {str(size): torch.tensor(sorted(ids[:size])) for size in SIZES}
    seen: dict[str, list[tuple[int, ...]]] = {"all": [], **{name: [] for name in subsets}}

    def best(hidden: Tensor) -> Chosen:
        logits = head.head(hidden.to(head.head.weight.dtype))
        for name, subset in subsets.items():
            seen[name].append(tuple(subset[logits[:, subset].argmax(dim=-1)].tolist()))
        seen["all"].append(tuple(logits.argmax(dim=-1).tolist()))
        return Chosen(seen["all"][-1])

    head.best = best  # type: ignore[method-assign]  # every head's choice of the same rows
    found: dict[str, list[list[int]]] = {name: [] for name in seen}
    for prompt in prompts:
        emitted = recorder.decode(prompt.ids, max_tokens).emitted
        for name, blocks in seen.items():
            found[name].append(right(emitted, blocks))
            blocks.clear()
        lengths = ", ".join(f"{name} {tokens_a_round(texts):.3f}" for name, texts in found.items())
        decode.say(f"{prompt.name}: {len(emitted)} tokens; tokens a round so far: {lengths}")
    del head.best
    return found


def times(pair: InProcess, draft: Engine, ids: Sequence[int], width: int) -> dict[str, float]:
    """Median seconds of a whole block with each head, in turn."""
    pending = prepare(pair, draft)
    weights = draft._guest.weights()  # noqa: SLF001 -- what nothing but a measurement needs
    heads = {"all": draft._lexicon}  # noqa: SLF001 -- the same
    for size in SIZES:
        vocabulary = torch.tensor(sorted(ids[:size]))
        smaller = replace(pair.network, vocabulary=vocabulary)
        heads[str(size)] = Borrowed(smaller, weights, pair.target.vocab_size)
    found: dict[str, list[float]] = {name: [] for name in heads}
    item = ProposeItem(sequence=1, base_pos=CONTEXT, pending=pending, width=width)
    for _ in range(REPEATS):
        for name, head in heads.items():
            draft._lexicon = head  # noqa: SLF001 -- the same
            found[name].append(draft.propose(item).draft_seconds)
    return {name: statistics.median(taken) for name, taken in found.items()}


def ids_of(options: Any, plan: Plan) -> list[int]:
    """The list, most useful first: the draft's own, or another."""
    path = options.list or Path(str(plan.draft)) / LIST
    ids: list[int] = json.loads(path.read_text())
    return ids


def main(arguments: Sequence[str]) -> int:
    """Measure what was asked for, and print the table."""
    parser = decode.common_options(__doc__)
    parser.set_defaults(draft_vocab=ALL)  # every id's score is looked at
    parser.add_argument("--acceptance", action="store_true")
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--list", type=Path, help=f"the draft's own {LIST} if left out")
    options = parser.parse_args(arguments)
    plan = decode.plan_of(options)
    prompts, stops = read_prompts(options.prompts, Path(plan.model), options.limit)
    pair = InProcess(plan, tuple(stops))
    draft = pair.draft
    if draft is None or not isinstance(draft._lexicon, Borrowed):  # noqa: SLF001 -- the same
        raise SystemExit("only a draft with its target's head is measured here")
    width, ids = pair.network.config.max_proposals + 1, ids_of(options, plan)
    exists = options.json is not None and options.json.exists()
    found: dict[str, Any] = json.loads(options.json.read_text()) if exists else {}
    if options.acceptance:
        recorder = Recorder(pair, draft, width)
        head = draft._lexicon  # noqa: SLF001 -- the same
        texts = acceptance(recorder, head, ids, prompts, options.max_tokens)
        found |= {"acceptance_of": machine.describe(), "right": texts}
    if options.times:
        found |= {"times_of": machine.describe(), "seconds": times(pair, draft, ids, width)}
    if options.json is not None:
        options.json.write_text(json.dumps(found, separators=(",", ":")) + "\n")
    for name, texts in found.get("right", {}).items():
        print(f"{name:>6} ids: {tokens_a_round(texts):.3f} tokens a round")
    for name, seconds in found.get("seconds", {}).items():
        print(f"{name:>6} ids: {1000 * seconds:.2f} ms a block")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
