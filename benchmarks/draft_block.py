"""Measure the draft's block against the bare products inside it, interleaved in one run.

``python benchmarks/draft_block.py [--model M] [--draft D] [--dtype D] [--json OUT]``

`step` is the engine's own time of one full block after `CONTEXT` positions: embedding, layers,
head, best ids. `linear` and `packed` are the same products alone, as in `forward.py`.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence

import decode
import torch
from forward import ROUNDS, WARM_UP, figures, plain_weight
from inprocess_worker import InProcess
from measuring import machine
from torch.nn import functional

from draft_daemon.engine import Engine
from draft_daemon.models.dflash import DFlash
from protocol.codec import pack_tokens
from protocol.kernels.linear import Product
from protocol.messages import IngestItem, OpenItem, PrefillItem, ProposeItem

CONTEXT = 200
SEQUENCE = 1


def prepare(pair: InProcess, draft: Engine) -> int:
    """Give both engines a context of random tokens; returns the pending token."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(pair.target.vocab_size, (CONTEXT,), generator=generator).tolist()
    opened = pair.engine.open(OpenItem(sequence=SEQUENCE, round=1))
    draft.open(OpenItem(sequence=SEQUENCE, round=1, slot=opened.slot))
    tokens = pack_tokens(ids)
    answer = pair.engine.prefill(
        PrefillItem(sequence=SEQUENCE, round=2, start=0, tokens=tokens, last=True)
    )
    draft.ingest(IngestItem(sequence=SEQUENCE, round=2, stop=CONTEXT))
    return answer.token


def products(pair: InProcess, draft: Engine) -> list[Product]:
    """Every product of one block, the head last."""
    network = pair.network.network
    if not isinstance(network, DFlash):
        raise SystemExit("only DFlash drafts are taken apart here")
    layers = network._layers  # noqa: SLF001 -- what nothing but a measurement needs
    found = [part for one in layers for part in (one.qkv, one.output, one.gate_up, one.down)]
    return [*found, draft._lexicon.head]  # noqa: SLF001 -- the same


@torch.inference_mode()
def measure(pair: InProcess, draft: Engine, width: int) -> dict[str, list[float]]:
    """Milliseconds of each kind of work, one of each a round."""
    pending = prepare(pair, draft)
    packed = products(pair, draft)
    plain = [plain_weight(product) for product in packed]
    rows = [width] * (len(packed) - 1) + [width - 1]  # the pending token's row is not scored
    pairs = zip(rows, plain, strict=True)
    inputs = [torch.randn(count, weight.shape[1]).to(weight.dtype) for count, weight in pairs]
    work: dict[str, Callable[[], object]] = {
        "linear": lambda: [functional.linear(x, w) for x, w in zip(inputs, plain, strict=True)],
        "packed": lambda: [product(x) for x, product in zip(inputs, packed, strict=True)],
    }
    times: dict[str, list[float]] = {"step": [], "linear": [], "packed": []}
    for number in range(WARM_UP + ROUNDS):
        proposed = draft.propose(
            ProposeItem(
                sequence=SEQUENCE, round=3 + number, base_pos=CONTEXT, pending=pending, width=width
            )
        )
        spent = {"step": proposed.draft_seconds}
        for name, call in work.items():
            started = time.perf_counter()
            call()
            spent[name] = time.perf_counter() - started
        if number >= WARM_UP:
            for name, seconds in spent.items():
                times[name].append(seconds * 1e3)
    return times


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and write."""
    options = decode.parse(arguments)
    pair = InProcess(decode.plan_of(options), ())
    if pair.draft is None:
        raise SystemExit("this model has no draft; say --draft FOLDER")
    width = pair.network.config.max_proposals + 1
    found = figures(measure(pair, pair.draft, width))
    sys.stdout.write(json.dumps({"width": width, **found}, indent=1) + "\n")
    if options.json:
        report = {"machine": machine.describe(), "width": width, **found}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
