"""The metadata that all producers of GGUF drafts spell alike, as keys of a z-lab config.json."""

from typing import Any

from protocol.checkpoints.dialects.base import GGUFFacts
from protocol.checkpoints.dialects.shape import (
    FULL,
    MAX_DIMENSION,
    MAX_LAYERS,
    MAX_POSITIONS,
    SLIDING,
)
from protocol.checkpoints.gguf_config import Metadata
from protocol.errors import CheckpointError, UnsupportedModel

TOKENS = "tokenizer.ggml.tokens"
SHARED = frozenset(
    """
    context_length embedding_length block_count feed_forward_length attention.head_count
    attention.head_count_kv attention.key_length attention.value_length vocab_size
    attention.layer_norm_rms_epsilon rope.freq_base rope.dimension_count
    attention.sliding_window attention.sliding_window_pattern
    """.split()  # noqa: SIM905 - a wall of quotes hides a missing one
)


def check_keys(facts: GGUFFacts, architecture: str, known: frozenset[str]) -> Metadata:
    """The architecture's metadata; UnsupportedModel for a key of it that is not `known`."""
    prefix = f"{architecture}."
    mine = {key.removeprefix(prefix) for key in facts.metadata if key.startswith(prefix)}
    strange = sorted(mine - known - SHARED)
    if strange:
        raise UnsupportedModel(f"{facts.where}: `{prefix}{strange[0]}` is not known here")
    return Metadata(facts.metadata, architecture, facts.where)


def shape(keys: Metadata, facts: GGUFFacts) -> dict[str, Any]:
    """Sizes, rotary base and kinds of layers; what is not said is an error, never a guess."""
    heads = keys.integer("attention.head_count")
    hidden, layers = keys.integer("embedding_length"), keys.integer("block_count", MAX_LAYERS)
    head_dim = keys.integer("attention.key_length")
    for name in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(name, default=head_dim) != head_dim:
            raise UnsupportedModel(
                f"{facts.where}: {keys.prefix}.{name} is {keys.raw(name)}; heads have {head_dim}"
            )
    return {
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base"),
        "max_position_embeddings": keys.integer("context_length", MAX_POSITIONS),
        "vocab_size": keys.integer("vocab_size", default=_vocabulary(keys, facts)),
        "layer_types": _layer_types(keys, layers),
        "sliding_window": keys.raw("attention.sliding_window") or None,
    }


def _vocabulary(keys: Metadata, facts: GGUFFacts) -> int | None:
    """Rows of the target's table: those of a copy of it, or the tokenizer's."""
    table, tokens = facts.shapes.get("token_embd.weight"), facts.metadata.get(TOKENS)
    if table is not None:
        return table[0]
    if isinstance(tokens, list) and 0 < len(tokens) <= MAX_DIMENSION:
        return len(tokens)
    if keys.raw("vocab_size") is None:
        raise CheckpointError(
            f"{facts.where}: neither {keys.prefix}.vocab_size nor {TOKENS} says how large the "
            "target's vocabulary is"
        )
    return None


def _layer_types(keys: Metadata, layers: int) -> list[str]:
    pattern = keys.raw("attention.sliding_window_pattern")
    if pattern is None:
        return [FULL] * layers
    if not isinstance(pattern, list) or len(pattern) != layers:
        shown = len(pattern) if isinstance(pattern, list) else pattern
        raise CheckpointError(
            f"{keys.where}: {keys.prefix}.attention.sliding_window_pattern: {shown} for {layers} "
            "layers"
        )
    return [SLIDING if slides else FULL for slides in pattern]
