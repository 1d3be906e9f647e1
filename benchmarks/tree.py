"""How many tokens a round emits with a chain and with a tree of as many rows, on the same texts.

``python benchmarks/tree.py [--prompts FILE] [--limit N] [--temperatures T,...] [--json OUT]``

Every prompt's text is the target's own. The draft is asked at every position of it, so that each
shape is played over the same answers, exactly: acceptance does not depend on the machine. Rows are
what a verify costs; what that is in seconds is for `forward.py` to say. Above temperature 0 the
draft is asked once for each of `launch.coupling.PARTS` of it, and its slots are ranked in these
ways, and by the part that `launch.coupling` chooses for each slot while decoding.
"""

import itertools
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
from msgspec.structs import replace

from draft_daemon.engine import Engine
from launch.coupling import PARTS, Coupling
from launch.token_ids import pack_ids, unpack_ids
from launch.tree import Ranks, Slot, grow
from protocol.messages import CloseItem, OpenItem, PrefillItem, ProposeItem, Sampling, VerifyItem

TOKENS: Final = 72
FEW: Final = 8  # alternatives at each slot
ROWS: Final = (4, 6, 8, 12, 16, 24)
SEEDED: Final = 3  # drafts of the chain that a tree begins with
SEED: Final = 100
ONLINE: Final = "chosen online"


@dataclass(frozen=True)
class Text:
    """One prompt's text, and what the draft had for each position of it: by part and slot."""

    tokens: list[int]
    slots: list[list[list[Slot]]]


def record(
    pair: InProcess, draft: Engine, prompt: Sequence[int], number: int, temperature: float
) -> Text:
    """The text, and the draft's alternatives after each of its tokens."""
    width = pair.network.config.max_proposals + 1
    chunk, heat = pair.target.prefill_chunk, Sampling(temperature=temperature, seed=SEED + number)
    sampling = replace(heat, prompt_tokens=len(prompt))
    opened = pair.engine.open(OpenItem(sequence=number, sampling=sampling))
    draft.open(OpenItem(sequence=number, slot=opened.slot, sampling=sampling))
    for start in range(0, len(prompt), chunk):
        part = pack_ids(prompt[start : start + chunk])
        last = start + chunk >= len(prompt)
        answer = pair.engine.prefill(
            PrefillItem(sequence=number, start=start, tokens=part, last=last)
        )
    tokens, slots = [answer.token], list[list[list[Slot]]]()
    while len(tokens) < TOKENS and not answer.finish:
        base = len(prompt) + len(tokens) - 1
        item = ProposeItem(
            sequence=number, base_pos=base, pending=tokens[-1], width=width, top_k=FEW
        )
        slots.append([_slots(draft, item, part * temperature) for part in parts_of(temperature)])
        verify = VerifyItem(
            sequence=number,
            round=base,
            base_pos=base,
            tokens=pack_ids(tokens[-1:]),
            budget=TOKENS - len(tokens),
        )
        answer = pair.engine.verify(verify)
        tokens += unpack_ids(answer.tokens)
    for engine in (pair.engine, draft):
        engine.close(CloseItem(sequence=number))
    return Text(tokens, slots)


def parts_of(temperature: float) -> Sequence[float]:
    """Parts of the temperature at which the draft is asked."""
    return PARTS if temperature else PARTS[:1]


def _slots(draft: Engine, item: ProposeItem, temperature: float) -> list[Slot]:
    heat = (temperature,) * (item.width - 1) if temperature else ()
    made = draft.propose(replace(item, temperatures=heat))
    ids, logs = unpack_ids(made.top_ids), made.top_logprobs
    cuts = [slice(at, at + FEW) for at in range(0, len(ids), FEW)]
    return [Slot(ids[cut], logs[cut]) for cut in cuts]


def play(
    texts: Sequence[Text], rows: int, chain: int, *, branches: bool = True, part: int = 0
) -> float:
    """Tokens a round: `rows` a verify, of which the chain has `chain` drafts.

    `part` is an index of `PARTS`; of all of them together, the one that is chosen while decoding.
    """
    ranks, coupling, emitted, rounds = Ranks(), Coupling(), 0, 0
    for text in texts:
        at = 0
        while at < len(text.slots):
            left, asked = text.tokens[at + 1 :], text.slots[at]
            places = range(min(len(asked[0]), len(left) - 1))
            every = part == len(PARTS)
            parts = coupling.parts(len(places)) if every else (part,) * len(places)
            slots = [asked[parts[place]][place] for place in places]
            nodes = rows - 1 if branches else min(rows - 1, chain, len(slots))
            tree = grow(slots, chain, nodes, ranks.weigh)
            kept = 1 + _accepted(tree.ids, tree.parents, left)
            ranks.note(slots, left[:kept])
            coupling.note(parts, [slot.ids[0] for slot in slots], left[:kept])
            at, emitted, rounds = at + kept, emitted + kept, rounds + 1
    return emitted / rounds


def _accepted(ids: Sequence[int], parents: Sequence[int], text: Sequence[int]) -> int:
    children = {edge: row for row, edge in enumerate(zip(parents, ids, strict=True), start=1)}
    row, depth = 0, 0
    while depth < len(text) and (row, text[depth]) in children:
        row, depth = children[row, text[depth]], depth + 1
    return depth


def compare(texts: Sequence[Text], part: int = 0) -> dict[str, dict[str, float]]:
    """By rows of a verify: the chain (as far as a block goes), and trees around it."""
    block = max(len(slots[0]) for text in texts for slots in text.slots)
    return {
        str(rows): {
            "chain": round(play(texts, rows, block, branches=False, part=part), 3),
            "tree": round(play(texts, rows, SEEDED, part=part), 3),
            "tree, whole chain first": round(play(texts, rows, block, part=part), 3),
        }
        for rows in ROWS
    }


def compare_all(texts: Sequence[Text], temperature: float) -> dict[str, object]:
    """`compare` for every way in which the draft was asked."""
    parts = parts_of(temperature)
    ways = {f"coupled at {part:g}": index for index, part in enumerate(parts)}
    if temperature:
        ways[ONLINE] = len(parts)
    return {way: compare(texts, part) for way, part in ways.items()}


def main(arguments: Sequence[str]) -> int:
    """Record, play, print, and write."""
    parser = decode.common_options(__doc__)
    parser.add_argument("--temperatures", default="0", help="separated by commas")
    options = parser.parse_args(arguments)
    plan = decode.plan_of(options)
    pair = InProcess(plan, ())
    if pair.draft is None:
        raise SystemExit("this model has no draft; say --draft FOLDER")
    prompts, _ = read_prompts(options.prompts, Path(plan.model), options.limit)
    found: dict[str, object] = {}
    numbers = itertools.count(1)
    for heat in map(float, options.temperatures.split(",")):
        texts = []
        for prompt in prompts:
            texts.append(record(pair, pair.draft, prompt.ids, next(numbers), heat))
            decode.say(f"temperature {heat:g}: {prompt.name}, {len(texts[-1].tokens)} tokens")
        tokens = sum(len(text.tokens) for text in texts)
        found[f"{heat:g}"] = {"tokens": tokens, "by_rows": compare_all(texts, heat)}
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    if options.json:
        report = {"machine": machine.describe(), **found}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
