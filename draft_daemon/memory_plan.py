"""What a draft will need, computed from its config before anything is loaded."""

import math
from collections.abc import Iterator

import torch

from draft_daemon.models.base import DraftNetwork
from protocol.checkpoints.draft_facts import DraftCheckpointConfig
from protocol.config import DraftConfig
from protocol.gpu import is_gpu
from protocol.kernels.blocked import is_blocked
from protocol.memory import Line, MemoryPlan, counted

FLOAT_BYTES = 4


def plan(
    config: DraftCheckpointConfig,
    network: type[DraftNetwork],
    settings: DraftConfig,
    dtype: torch.dtype,
    vocabulary: int,
) -> MemoryPlan:
    """Count a draft that computes in `dtype`; `vocabulary` ids may be proposed, 0: all of them.

    The embedding and head that it borrows cost nothing where they are the target's own pages.
    """
    lines = (*_fixed(config, network, settings, dtype, vocabulary),)
    context = _context(config, settings, dtype)
    fixed = sum(line.size for line in lines)
    each = context.size // settings.context_window
    return MemoryPlan(
        "draft", (*lines, context), settings.context_window, settings.slots, fixed, each
    )


def _fixed(
    config: DraftCheckpointConfig,
    network: type[DraftNetwork],
    settings: DraftConfig,
    dtype: torch.dtype,
    vocabulary: int,
) -> Iterator[Line]:
    size, hidden = (dtype.itemsize, "bytes"), (config.hidden_size, "wide")
    sizes = [math.prod(shape) for shape in network.shapes(config).values()]
    yield counted("weights", (sum(sizes), "weights"), size)
    if is_blocked(dtype, settings.device):
        yield counted("one product on its way", (2, "parts"), (max(sizes), "weights"), size)
    if config.reduced_vocabulary:
        yield counted("own head", (config.draft_vocab_size, "ids"), hidden, size)
    if vocabulary:
        yield counted("copied rows of the head", (vocabulary, "ids"), hidden, size)
    if settings.target_model or is_gpu(settings.device):
        table = (config.vocab_size, "ids"), hidden, size
        yield counted("embedding and head, copied", (2, "tables"), *table)
    yield _working(config, settings, dtype, vocabulary)


def _context(config: DraftCheckpointConfig, settings: DraftConfig, dtype: torch.dtype) -> Line:
    return counted(
        "context",
        (settings.slots, "slots"),
        (settings.context_window + config.max_proposals + 1, "positions"),
        (2 * len(config.layers), "tensors"),
        (config.num_kv_heads * config.head_dim, "wide"),
        (dtype.itemsize, "bytes"),
    )


def _working(
    config: DraftCheckpointConfig, settings: DraftConfig, dtype: torch.dtype, vocabulary: int
) -> Line:
    """One ingest, one block and its scores."""
    rows, block = settings.max_ingest, config.max_proposals + 1
    wide = config.feature_width + 2 * len(config.layers) * config.num_kv_heads * config.head_dim
    scored = vocabulary or config.draft_vocab_size
    return Line(
        "working memory",
        4 * rows * wide * dtype.itemsize
        + 8 * block * (config.hidden_size + config.intermediate_size) * dtype.itemsize
        + 2 * block * scored * FLOAT_BYTES,
        f"4 x {rows} rows of ingest + 8 x {block} rows of one layer + 2 x {block} rows of scores",
    )
