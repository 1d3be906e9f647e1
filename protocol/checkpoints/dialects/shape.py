"""The parts that all dialects of a draft's config.json spell alike, read with bounds."""

from collections.abc import Mapping
from typing import Any, Final

from protocol.checkpoints import rope_keys
from protocol.checkpoints.draft_facts import LayerRule
from protocol.checkpoints.draft_variants import REFUSED
from protocol.checkpoints.keys import Keys
from protocol.errors import CheckpointError, UnsupportedModel

MAX_DIMENSION: Final = 1 << 24
MAX_LAYERS: Final = 256
MAX_TAPS: Final = 64
MAX_LAYER_ID: Final = 4095
MAX_BLOCK: Final = 1024
MAX_POSITIONS: Final = 1 << 31
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
READ: Final = frozenset(
    """
    architectures hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim rms_norm_eps attention_bias vocab_size rope_theta
    rope_parameters rope_scaling max_position_embeddings layer_types sliding_window
    use_sliding_window is_causal block_size num_target_layers dflash_config target_hidden_size
    draft_vocab_size eagle_aux_hidden_state_layer_ids sample_from_anchor mask_token_id
    target_layer_ids aux_hidden_state_layer_ids transformer_layer_config speculators_config
    speculators_model_type sliding_window_non_causal input_embedding_scale projector_type
    output_multiplier logit_scale final_logit_softcapping
    """.split()  # noqa: SIM905 - a wall of quotes hides a missing one
)


def shape(keys: Keys, where: str) -> dict[str, Any]:
    """The fields of the canonical form that all dialects spell alike."""
    heads = keys.integer("num_attention_heads", high=MAX_DIMENSION)
    kv_heads = keys.integer("num_key_value_heads", high=heads)
    hidden = keys.integer("hidden_size", high=MAX_DIMENSION)
    head_dim = keys.integer("head_dim", high=MAX_DIMENSION, default=max(1, hidden // heads))
    if heads % kv_heads or head_dim % 2:
        raise CheckpointError(
            f"{where}: {heads} heads of {head_dim} over {kv_heads} key heads: the first must be a "
            "multiple of the last, and rotary positions need pairs"
        )
    theta, scaling = _rope(keys, where)
    return {
        "hidden_size": hidden,
        "intermediate_size": keys.integer("intermediate_size", high=MAX_DIMENSION),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": keys.number("rms_norm_eps"),
        "attention_bias": keys.flag("attention_bias", default=False),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_positions": keys.integer("max_position_embeddings", high=MAX_POSITIONS),
        "vocab_size": keys.integer("vocab_size", high=MAX_DIMENSION),
    }


def _rope(keys: Keys, where: str) -> tuple[float, Mapping[str, Any]]:
    """Theta and scaling as the file states them; a file that states no theta is refused."""
    scaling = {**keys.mapping("rope_scaling"), **keys.mapping("rope_parameters")}
    inner = Keys(scaling, f"{where}: rope_parameters")
    outer_theta, inner_theta = (
        keys.optional_number("rope_theta"),
        inner.optional_number("rope_theta"),
    )
    theta = inner_theta or outer_theta
    if theta is None:
        # 10000, 1e6 and 1e7 are all common; a wrong guess loads and ruins acceptance.
        raise CheckpointError(
            f"{where}: neither `rope_theta` nor `rope_parameters.rope_theta` is there; "
            "a draft's rotary base is never guessed"
        )
    if outer_theta not in (None, theta):
        raise CheckpointError(
            f"{where}: rope_theta is {outer_theta}, but rope_parameters say {inner_theta}"
        )
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"{where}: `partial_rotary_factor` is not supported yet")
    return theta, rope_keys.scaling(inner, where)


def layer_types(keys: Keys, num_layers: int, where: str) -> tuple[str, ...]:
    kinds = keys.texts("layer_types") or (FULL,) * num_layers
    if len(kinds) != num_layers:
        raise CheckpointError(f"{where}: {len(kinds)} `layer_types` for {num_layers} layers")
    unknown = sorted(set(kinds) - {FULL, SLIDING})
    if unknown:
        raise UnsupportedModel(f"{where}: layer type {unknown[0]!r}; known: {FULL}, {SLIDING}")
    return kinds


def window(keys: Keys) -> int | None:
    """Width of sliding layers; 0 where the file switches it off, None where it does not say."""
    if not keys.flag("use_sliding_window", default=True):
        return 0
    return keys.optional_integer("sliding_window", high=MAX_POSITIONS)


def rules(
    kinds: tuple[str, ...], window: int | None, causal: bool | None, where: str
) -> tuple[LayerRule, ...]:
    """Apply vLLM's rule: a stated `causal` decides, else sliding layers are and full are not.

    With `causal` None or a file-wide False this is the same for both dialects.
    """
    if SLIDING in kinds and window is None:
        raise CheckpointError(f"{where}: sliding layers, but no `sliding_window` says how wide")
    return tuple(
        LayerRule(
            causal=(kind == SLIDING) if causal is None else causal,
            window=(window or 0) if kind == SLIDING else 0,
        )
        for kind in kinds
    )


def ids(raw: Mapping[str, Any], key: str, where: str, *, low: int) -> tuple[int, ...]:
    """Different layers of the target, numbered from `low` on."""
    found = Keys(raw, where).ids(key, high=MAX_LAYER_ID)
    if not 1 <= len(found) <= MAX_TAPS or min(found) < low or len(set(found)) != len(found):
        raise CheckpointError(
            f"{where}: key `{key}`: expected 1..{MAX_TAPS} different layers from {low} on, "
            f"found {list(found)[:MAX_TAPS]}"
        )
    return found


def optional_flag(keys: Keys, raw: Mapping[str, Any], key: str) -> bool | None:
    """A boolean, or None where the file does not say."""
    return None if raw.get(key) is None else keys.flag(key, default=False)


def ignored(raw: Mapping[str, Any], options: frozenset[str]) -> tuple[str, ...]:
    """Keys of `raw` that change nothing; `options` are those of the network at hand."""
    return tuple(sorted(raw.keys() - READ - REFUSED.keys() - options))
