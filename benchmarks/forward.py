"""Measure the target's forward against the bare products inside it, interleaved in one run.

``python benchmarks/forward.py [--model M] [--dtype D] [--widths 1,2,8] [--context N] [--json OUT]``

`step` is one `verify_batch` with logits for all rows; `linear` the same products (layers and
head) by `F.linear` over weights ``[out, in]``; `packed` the same by the target's own packed
weights; `choose` the choice of a token at every row of the step's logits, by `SAMPLING`. The
context is ordinary text, our own prompts: behind random ids far more tokens are likely, and a
choice takes longer. Ratios are made round by round, so that a busy moment meets all alike.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from measuring import machine
from torch import Tensor
from torch.nn import functional

from launch.models import DEFAULT_NAME, resolve_model
from launch.store import default_home
from launch.tokenizer import load_text_side
from protocol.choice import choose
from protocol.config import TargetConfig
from protocol.cpu import usable_cores
from protocol.kernels.linear import Linear, Product
from protocol.messages import Sampling
from protocol.transports.local import TRANSPORT
from target_daemon.dense.model import DenseTarget
from target_daemon.families.base import load_target

ROUNDS: Final = 21
SAMPLING: Final = Sampling(temperature=0.8, top_p=0.95, seed=1)
WARM_UP: Final = 3
PROMPTS: Final = Path(__file__).parent / "prompts.jsonl"


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and write."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    model = resolve_model(options.model, home=default_home(os.environ)).path
    target, text = load(options, model), ordinary_text(model)
    widths = options.widths
    measured = {str(width): measure(target, text, width, options.context) for width in widths}
    first = measured[str(options.widths[0])]["step_ms"]
    for figures in measured.values():
        figures["step / step of the first width"] = round(figures["step_ms"] / first, 3)
    report = {
        "machine": machine.describe(),
        "model": options.model,
        "dtype": str(target.dtype),
        "threads": options.threads,
        "context": options.context,
        "exact": [target.exactness.kind, target.exactness.detail],
        "widths": measured,
    }
    sys.stdout.write(json.dumps(measured, indent=1) + "\n")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=DEFAULT_NAME)
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16")
    )
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument(
        "--widths", type=lambda text: [int(w) for w in text.split(",")], default=[1, 2, 8]
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def ordinary_text(model: Path) -> Tensor:
    """Ids [n] of our own prompts, one behind the other: few tokens are likely behind each."""
    tokenizer, _ = load_text_side(model)
    lines = map(json.loads, PROMPTS.read_text(encoding="utf-8").splitlines())
    text = "\n".join(line["turns"][0] for line in lines)
    return torch.tensor(tokenizer.encode(text, add_special=False))


def load(options: argparse.Namespace, model: Path) -> DenseTarget:
    """The target in this process."""
    config = TargetConfig(
        model=str(model),
        run_dir="",
        life=0,
        dtype=options.dtype,
        exact=options.exact,
        threads=options.threads,
        block_size=max(options.widths),
        slots=1,
    )
    target = load_target(config, TRANSPORT.host(Path("/forward")))  # a key, never a folder
    if not isinstance(target, DenseTarget):
        raise SystemExit("only dense targets are taken apart here")
    return target


@torch.inference_mode()
def measure(target: DenseTarget, text: Tensor, width: int, context: int) -> dict[str, Any]:
    """Median times and ratios of one width after `context` positions of `text` [n]."""
    generator = torch.Generator().manual_seed(0)
    ids = text.repeat(-(-(context + width) // len(text)))[: context + width]
    for start in range(0, context, target.prefill_chunk):
        stop = min(start + target.prefill_chunk, context)
        target.verify_batch(0, ids[start:stop], start, "none")
    packed = [product for layer in target.weights.layers for product in layer.products()]
    packed.append(target.weights.head)
    plain = [plain_weight(product) for product in packed]
    inputs = {
        size: torch.randn(width, size, generator=generator).to(target.dtype)
        for size in {weight.shape[1] for weight in plain}
    }
    logits = target.verify_batch(0, ids[context:], context, "all")
    assert logits is not None
    work: dict[str, Callable[[], object]] = {
        "step": lambda: target.verify_batch(0, ids[context:], context, "all"),
        "linear": lambda: [functional.linear(inputs[w.shape[1]], w) for w in plain],
        "packed": lambda: [
            product(inputs[weight.shape[1]]) for product, weight in zip(packed, plain, strict=True)
        ],
        "choose": lambda: choose(logits, context + 1, SAMPLING, ids[: context + 1]),
    }
    times: dict[str, list[float]] = {name: [] for name in work}
    for number in range(WARM_UP + ROUNDS):
        for name, call in work.items():
            started = time.perf_counter()
            call()
            if number >= WARM_UP:
                times[name].append((time.perf_counter() - started) * 1e3)
    return figures(times)


def plain_weight(product: Product) -> Tensor:
    """The weight as `F.linear` takes it, [out, in]."""
    weight = product.tensors()[0]
    if isinstance(product, Linear) and product.transposed:
        return weight.t().contiguous()
    return weight.to_dense() if weight.is_mkldnn else weight


def figures(times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians of each, ratios of `step` to `linear` and `packed`, and of `choose` to `step`."""
    found: dict[str, Any] = {
        f"{name}_ms": round(statistics.median(values), 3) for name, values in times.items()
    }
    for base in ("linear", "packed"):
        pairs = zip(times["step"], times[base], strict=True)
        found[f"step / {base}"] = round(statistics.median(a / b for a, b in pairs), 3)
        found[f"least step / least {base}"] = round(min(times["step"]) / min(times[base]), 3)
    if "choose" in times:
        pairs = zip(times["choose"], times["step"], strict=True)
        found["choose / step"] = round(statistics.median(a / b for a, b in pairs), 3)
        found["least choose / least step"] = round(min(times["choose"]) / min(times["step"]), 3)
    return found


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
