"""What a target will need, computed from its config before anything is loaded."""

import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import torch

from protocol.checkpoints.target_config import ModelConfig
from protocol.checkpoints.tensors import open_tensors
from protocol.config import Computed, TargetConfig
from protocol.gpu import is_gpu
from protocol.kernels.blocked import is_blocked
from protocol.kernels.quantised import BITS, packed_bytes
from protocol.layer_split import layers_of
from protocol.memory import Line, MemoryPlan, counted

SIZES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
ID_BYTES: Final = 8


def plan(model: ModelConfig, config: TargetConfig, dtype: Computed) -> MemoryPlan:
    """Count a target of `model` that computes in `dtype`: a dense one by its config.

    Of any other the weights are counted as they lie in ``config.model``, and its state as if
    every layer had full attention; CheckpointError where the files cannot be read.
    """
    return _counted("target", model, config, functools.partial(_lines, model, config, dtype))


def plans(model: ModelConfig, config: TargetConfig, dtype: Computed) -> tuple[MemoryPlan, ...]:
    """A plan for each of the target's devices, in their order; ConfigError for a wrong split."""
    if len(config.devices) < 2 or not model.dense:
        return (plan(model, config, dtype),)
    counts = layers_of(model.num_layers, config.devices, config.layer_split)
    return tuple(
        _counted(
            f"target on {name}",
            model,
            config,
            functools.partial(_part, model, config, dtype, layers, first=at == 0),
        )
        for at, (name, layers) in enumerate(zip(config.devices, counts, strict=True))
    )


def _counted(
    role: str, model: ModelConfig, config: TargetConfig, lines: Callable[[int], tuple[Line, ...]]
) -> MemoryPlan:
    positions = min(config.max_positions or model.max_positions, model.max_positions)
    fixed, first = (sum(part.size for part in lines(n)) for n in (0, 1))
    return MemoryPlan(role, lines(positions), positions, config.slots, fixed, first - fixed)


def _lines(
    model: ModelConfig, config: TargetConfig, dtype: str, positions: int
) -> tuple[Line, ...]:
    if not model.dense:
        return _general_lines(model, config, positions, SIZES[dtype])
    return _part(model, config, dtype, model.num_layers, positions, first=True)


def _part(
    model: ModelConfig,
    config: TargetConfig,
    dtype: str,
    layers: int,
    positions: int,
    *,
    first: bool,
) -> tuple[Line, ...]:
    """What the device of so many `layers` holds; the first one has all that is not of a layer."""
    size, some = SIZES[dtype], msgspec.structs.replace(model, num_layers=layers)
    home = (
        *_ends(model, dtype, device=config.device),
        _ring(model, config, size),
        *_exported(model, config, size),
        *_prefixes(model, config, positions, size),
    )
    return (
        *_layers(some, config, dtype),
        _key_values(some, config.slots, positions, size),
        *(home if first else ()),
        _context(model, config.slots, positions, size),
        _working(model, config, positions, size),
    )


def _general_lines(
    model: ModelConfig, config: TargetConfig, positions: int, size: int
) -> tuple[Line, ...]:
    """Upper bounds for an architecture that only its library knows."""
    with open_tensors(Path(config.model)) as tensors:
        weights = sum(math.prod(tensors.shape(name)) for name in tensors.names())
    wide, rows = max(model.intermediate_size, 4 * model.hidden_size), _widest(config)
    table = ((model.vocab_size, "ids"), (model.hidden_size, "wide"), (size, "bytes"))
    scores = 2 * model.num_heads * rows * positions * SIZES["float32"]
    logits = 2 * rows * model.vocab_size * SIZES["float32"]
    return (
        counted("weights", (weights, "weights"), (size, "bytes")),
        counted("embedding and head, moved", (2, "tables"), *table),
        # They grow by concatenation: the old rows live until the new ones are written.
        counted(
            "keys and values",
            (config.slots, "slots"),
            (positions, "positions"),
            (2 * model.num_layers + 2, "tensors"),
            (model.num_kv_heads * model.head_dim, "wide"),
            (size, "bytes"),
        ),
        _ring(model, config, size),
        *_prefixes(model, config, positions, size),
        counted(
            "token ids", (config.slots, "slots"), (positions, "positions"), (ID_BYTES, "bytes")
        ),
        Line(
            "working memory",
            logits + scores + 16 * rows * wide * size,
            f"2 x {rows} rows of logits + 2 x {model.num_heads * rows:,} rows of scores + 16 x "
            f"{rows} rows of one layer",
        ),
    )


def _layers(model: ModelConfig, config: TargetConfig, dtype: str) -> Iterator[Line]:
    layers, norms, size = model.num_layers, 2 * model.hidden_size, SIZES[dtype]
    products = product_shapes(model)
    weights = sum(math.prod(shape) for shape in products)
    if config.weights == "dtype":
        held = ((layers, "layers"), (weights + norms, "weights"), (size, "bytes"))
        yield counted("layers", *held)
        if is_blocked(getattr(torch, dtype), config.device):
            widest = max(math.prod(shape) for shape in products)
            yield counted("one product on its way to them", (widest, "weights"), (size, "bytes"))
        return
    bits = BITS[config.weights]
    each = sum(packed_bytes(shape, bits) for shape in products) + norms * size
    yield Line(
        f"layers, {config.weights}",
        layers * each,
        f"{layers} layers x {each:,} bytes: {weights:,} weights of {bits} bits with their scales",
    )
    widest = max(math.prod(shape) for shape in products)
    # Its part in float32, and all of it as whole numbers, before they are packed.
    yield counted("one product on its way to them", (widest, "weights"), (12, "bytes"))


def product_shapes(model: ModelConfig) -> tuple[tuple[int, int], ...]:
    """[out, in] of a dense layer's products: query, key and value; output; gate and up; down."""
    hidden, inner, dim = model.hidden_size, model.intermediate_size, model.head_dim
    heads, shared = model.num_heads * dim, model.num_kv_heads * dim
    return ((heads + 2 * shared, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner))


def _ends(model: ModelConfig, dtype: str, *, device: str) -> Iterator[Line]:
    hidden, size = model.hidden_size, SIZES[dtype]
    stored = model.dtype if model.dtype in SIZES else "bfloat16"
    table = ((model.vocab_size, "ids"), (hidden, "wide"))
    yield counted("embedding", *table, (SIZES[str(stored)], f"bytes ({stored})"))
    # A tied head that can be the embedding itself costs nothing; else it is laid out once more.
    if not model.tied or stored != dtype or dtype == "float32":
        yield counted("head", *table, (size, f"bytes ({dtype})"))
    if is_blocked(getattr(torch, dtype), device):
        yield counted("head, as the processor takes it", *table, (size, f"bytes ({dtype})"))


def _key_values(model: ModelConfig, slots: int, positions: int, size: int) -> Line:
    return counted(
        "keys and values",
        (slots, "slots"),
        (positions, "positions"),
        (2 * model.num_layers, "tensors"),
        (model.num_kv_heads * model.head_dim, "wide"),
        (size, "bytes"),
    )


def _ring(model: ModelConfig, config: TargetConfig, size: int) -> Line:
    return counted(
        "feature ring",
        (config.slots, "slots"),
        (config.ring_window + _widest(config), "rows"),
        (len(config.taps) * model.hidden_size, "wide"),
        (size, "bytes"),
    )


def _exported(model: ModelConfig, config: TargetConfig, size: int) -> Iterator[Line]:
    """On a GPU a draft may write what it maps, so that it gets copies of embedding and head."""
    if is_gpu(config.device) and config.taps:
        table = ((model.vocab_size, "ids"), (model.hidden_size, "wide"), (size, "bytes"))
        yield counted("embedding and head, exported", (2, "tables"), *table)


def _prefixes(
    model: ModelConfig, config: TargetConfig, positions: int, size: int
) -> Iterator[Line]:
    if config.prefix_bytes:
        told, remedy = "what --prefix-memory allows", "a smaller --prefix-memory"
        yield Line("kept prefixes", config.prefix_bytes, told, remedy)
    if config.prefix_folder:
        one = _key_values(model, 1, positions, size)
        yield Line("one prefix on its way from disk", one.size, one.arithmetic)


def _context(model: ModelConfig, slots: int, positions: int, size: int) -> Line:
    return Line(
        "context tables",
        positions * (2 * model.head_dim * size + slots * ID_BYTES),
        f"{positions:,} positions x (2 x {model.head_dim} x {size} bytes of angles "
        f"+ {slots} x {ID_BYTES} bytes of ids)",
    )


def _working(model: ModelConfig, config: TargetConfig, positions: int, size: int) -> Line:
    """The widest forward: logits, the rows of one layer, and the attention mask."""
    rows, group = _widest(config), model.num_heads // model.num_kv_heads
    logits = 2 * config.block_size * model.vocab_size * SIZES["float32"]
    layer = 8 * rows * (model.hidden_size + model.intermediate_size) * size
    mask = group * rows * positions * size
    return Line(
        "working memory",
        logits + layer + mask,
        f"2 x {config.block_size} rows of logits + 8 x {rows} rows of one layer + the mask of "
        f"{group * rows:,} rows",
    )


def _widest(config: TargetConfig) -> int:
    return max(config.prefill_chunk, config.block_size)
