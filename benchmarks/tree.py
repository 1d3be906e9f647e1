"""How many tokens a round emits with a chain and with a tree of as many rows, on the same texts.

``python benchmarks/tree.py [--model M] [--draft D] [--dtype D] [--prompts N] [--json OUT]``

Every prompt's text is the target's own. The draft is asked at every position of it, so that each
shape is played over the same answers, exactly: acceptance does not depend on the machine. Rows are
what a verify costs; what that is in seconds is for `forward.py` to say.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import decode
from inprocess_worker import InProcess
from measuring import machine
from measuring.prompts import read_prompts

from draft_daemon.engine import Engine
from launch.token_ids import pack_ids, unpack_ids
from launch.tree import Ranks, Slot, grow
from protocol.messages import CloseItem, OpenItem, PrefillItem, ProposeItem, Sampling, VerifyItem

TOKENS: Final = 72
FEW: Final = 8  # alternatives at each slot
ROWS: Final = (4, 6, 8, 12, 16, 24)
SEEDED: Final = 3  # drafts of the chain that a tree begins with


@dataclass(frozen=True)
class Text:
    """One prompt's text, and what the draft had for each position of it."""

    tokens: list[int]
    slots: list[list[Slot]]


def record(pair: InProcess, draft: Engine, prompt: Sequence[int], number: int) -> Text:
    """The greedy text, and the draft's alternatives after each of its tokens."""
    width = pair.network.config.max_proposals + 1
    chunk = pair.target.prefill_chunk
    opened = pair.engine.open(OpenItem(sequence=number, sampling=Sampling()))
    draft.open(OpenItem(sequence=number, slot=opened.slot))
    for start in range(0, len(prompt), chunk):
        part = pack_ids(prompt[start : start + chunk])
        last = start + chunk >= len(prompt)
        answer = pair.engine.prefill(
            PrefillItem(sequence=number, start=start, tokens=part, last=last)
        )
    tokens, slots = [answer.token], list[list[Slot]]()
    while len(tokens) < TOKENS and not answer.finish:
        base = len(prompt) + len(tokens) - 1
        made = draft.propose(
            ProposeItem(sequence=number, base_pos=base, pending=tokens[-1], width=width, top_k=FEW)
        )
        ids, logs = unpack_ids(made.top_ids), made.top_logprobs
        cuts = [slice(at, at + FEW) for at in range(0, len(ids), FEW)]
        slots.append([Slot(ids[cut], logs[cut]) for cut in cuts])
        item = VerifyItem(
            sequence=number,
            round=base,
            base_pos=base,
            tokens=pack_ids(tokens[-1:]),
            budget=TOKENS - len(tokens),
        )
        answer = pair.engine.verify(item)
        tokens += unpack_ids(answer.tokens)
    for engine in (pair.engine, draft):
        engine.close(CloseItem(sequence=number))
    return Text(tokens, slots)


def play(texts: Sequence[Text], rows: int, chain: int, *, branches: bool = True) -> float:
    """Tokens a round: `rows` a verify, of which the chain has `chain` drafts."""
    ranks, emitted, rounds = Ranks(), 0, 0
    for text in texts:
        at = 0
        while at < len(text.slots):
            left = text.tokens[at + 1 :]
            slots = text.slots[at][: len(left) - 1]
            nodes = rows - 1 if branches else min(rows - 1, chain, len(slots))
            tree = grow(slots, chain, nodes, ranks.weigh)
            kept = 1 + _accepted(tree.ids, tree.parents, left)
            ranks.note(slots, left[:kept])
            at, emitted, rounds = at + kept, emitted + kept, rounds + 1
    return emitted / rounds


def _accepted(ids: Sequence[int], parents: Sequence[int], text: Sequence[int]) -> int:
    children = {edge: row for row, edge in enumerate(zip(parents, ids, strict=True), start=1)}
    row, depth = 0, 0
    while depth < len(text) and (row, text[depth]) in children:
        row, depth = children[row, text[depth]], depth + 1
    return depth


def compare(texts: Sequence[Text]) -> dict[str, dict[str, float]]:
    """By rows of a verify: the chain (as far as a block goes), and trees around it."""
    block = max(len(slots) for text in texts for slots in text.slots)
    return {
        str(rows): {
            "chain": round(play(texts, rows, block, branches=False), 3),
            "tree": round(play(texts, rows, SEEDED), 3),
            "tree, whole chain first": round(play(texts, rows, block), 3),
        }
        for rows in ROWS
    }


def main(arguments: Sequence[str]) -> int:
    """Record, play, print, and write."""
    options = decode.parse(arguments)
    plan = decode.plan_of(options)
    pair = InProcess(plan, ())
    if pair.draft is None:
        raise SystemExit("this model has no draft; say --draft FOLDER")
    prompts, _ = read_prompts(options.prompts, Path(plan.model), options.limit)
    texts = [
        record(pair, pair.draft, prompt.ids, number) for number, prompt in enumerate(prompts, 1)
    ]
    found = {"tokens": sum(len(text.tokens) for text in texts), "by_rows": compare(texts)}
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    if options.json:
        report = {"machine": machine.describe(), **found}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
