"""The published dialects of a DFlash draft's config.json, each mapped to the canonical facts.

``z-lab``: flat Qwen3-style keys plus ``dflash_config``. ``speculators``: the network under
``transformer_layer_config``, and layer ids that count layer *inputs*, one higher than everybody
else's. A key that asks for arithmetic this program does not do is refused by name; one that
changes nothing is listed in ``ignored``.
"""

from collections.abc import Mapping
from typing import Any, Final

from protocol.checkpoints import rope_keys
from protocol.checkpoints.draft_facts import DraftCheckpointConfig, LayerRule
from protocol.checkpoints.draft_variants import REFUSED, refuse_variants
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
    speculators_model_type sliding_window_non_causal input_embedding_scale
    """.split()  # noqa: SIM905 - a wall of quotes hides a missing one
)


def canonical(raw: Mapping[str, Any], where: str) -> DraftCheckpointConfig:
    """Map one decoded ``config.json``; `where` names the file in errors."""
    refuse_variants(raw, where)
    if "transformer_layer_config" in raw or "speculators_model_type" in raw:
        return _speculators(raw, where)
    return _z_lab(raw, where)


def _z_lab(raw: Mapping[str, Any], where: str) -> DraftCheckpointConfig:
    flat = Keys(raw, where)
    nested = Keys(flat.mapping("dflash_config"), f"{where}: dflash_config")
    shape = _shape(flat, where)
    kinds = _layer_types(flat, flat.integer("num_hidden_layers", high=MAX_LAYERS), where)
    causal = _optional_flag(flat, raw, "is_causal")
    if causal is None:
        causal = _optional_flag(nested, flat.mapping("dflash_config"), "causal")
    layers = _agreed("num_target_layers", flat, nested, where, high=MAX_LAYER_ID) or 0
    return DraftCheckpointConfig(
        dialect="z-lab",
        **shape,
        layers=_rules(kinds, _z_lab_window(flat, nested, where), causal, where),
        block_size=_required("block_size", flat, nested, where, low=2, high=MAX_BLOCK),
        mask_token_id=_required("mask_token_id", flat, nested, where, low=0, high=MAX_DIMENSION),
        target_layer_ids=_z_lab_taps(flat, raw, layers, len(kinds), where),
        num_target_layers=layers,
        sample_from_anchor=nested.flag(
            "sample_from_anchor", default=flat.flag("sample_from_anchor", default=False)
        ),
        embedding_scale=nested.optional_number("input_embedding_scale")
        or flat.optional_number("input_embedding_scale")
        or 1.0,
        draft_vocab_size=flat.integer(
            "draft_vocab_size", high=shape["vocab_size"], default=shape["vocab_size"]
        ),
        ignored=_ignored(raw),
    )


def _speculators(raw: Mapping[str, Any], where: str) -> DraftCheckpointConfig:
    keys = Keys(raw, where)
    inner_raw = keys.mapping("transformer_layer_config")
    inner = Keys(inner_raw, f"{where}: transformer_layer_config")
    shape = _shape(inner, where)
    wanted = keys.integer("target_hidden_size", high=MAX_DIMENSION, default=shape["hidden_size"])
    if wanted != shape["hidden_size"]:
        raise UnsupportedModel(
            f"{where}: target_hidden_size {wanted} is not hidden_size {shape['hidden_size']}; a "
            "draft of another width than its target's is not supported yet"
        )
    kinds = _layer_types(inner, inner.integer("num_hidden_layers", high=MAX_LAYERS), where)
    # In this dialect the flag is about sliding layers alone; full ones are always bidirectional.
    bidirectional = keys.flag("sliding_window_non_causal", default=False)
    inputs = _ids(raw, "aux_hidden_state_layer_ids", where, low=1)
    return DraftCheckpointConfig(
        dialect="speculators",
        **shape,
        layers=_rules(kinds, _window(inner), False if bidirectional else None, where),
        block_size=keys.integer("block_size", low=2, high=MAX_BLOCK),
        mask_token_id=keys.integer("mask_token_id", low=0, high=MAX_DIMENSION),
        # This dialect counts layer inputs: the input of layer i + 1 is the output of layer i.
        target_layer_ids=tuple(number - 1 for number in inputs),
        num_target_layers=0,
        sample_from_anchor=keys.flag("sample_from_anchor", default=False),
        embedding_scale=1.0,
        draft_vocab_size=keys.integer(
            "draft_vocab_size", high=shape["vocab_size"], default=shape["vocab_size"]
        ),
        ignored=tuple(sorted({*_ignored(raw), *_ignored(inner_raw)})),
    )


def _shape(keys: Keys, where: str) -> dict[str, Any]:
    """The fields that both dialects spell alike."""
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
        "network": "dflash",
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


def _layer_types(keys: Keys, num_layers: int, where: str) -> tuple[str, ...]:
    kinds = keys.texts("layer_types") or (FULL,) * num_layers
    if len(kinds) != num_layers:
        raise CheckpointError(f"{where}: {len(kinds)} `layer_types` for {num_layers} layers")
    unknown = sorted(set(kinds) - {FULL, SLIDING})
    if unknown:
        raise UnsupportedModel(f"{where}: layer type {unknown[0]!r}; known: {FULL}, {SLIDING}")
    return kinds


def _window(keys: Keys) -> int | None:
    """Width of sliding layers; 0 where the file switches it off, None where it does not say."""
    if not keys.flag("use_sliding_window", default=True):
        return 0
    return keys.optional_integer("sliding_window", high=MAX_POSITIONS)


def _z_lab_window(flat: Keys, nested: Keys, where: str) -> int | None:
    own = nested.optional_integer("swa_window_size", high=MAX_POSITIONS)
    types = flat.texts("layer_types")
    if nested.flag("use_swa", default=SLIDING in types) != (SLIDING in types):
        raise CheckpointError(f"{where}: dflash_config.use_swa contradicts `layer_types`")
    return _window(flat) if own is None else own


def _rules(
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


def _z_lab_taps(
    flat: Keys,
    raw: Mapping[str, Any],
    target_layers: int,
    num_layers: int,
    where: str,
) -> tuple[int, ...]:
    inner = flat.mapping("dflash_config")
    holder = inner if inner.get("target_layer_ids") is not None else raw
    inputs_key = "eagle_aux_hidden_state_layer_ids"
    outputs = None
    if raw.get(inputs_key) is not None:
        outputs = tuple(number - 1 for number in _ids(raw, inputs_key, where, low=1))
    if holder.get("target_layer_ids") is None:
        return outputs or _default_taps(target_layers, num_layers, where)
    taps = _ids(holder, "target_layer_ids", where, low=0)
    if outputs not in (None, taps):
        raise CheckpointError(f"{where}: {inputs_key} mean {outputs}, target_layer_ids {taps}")
    return taps


def _default_taps(target_layers: int, num_layers: int, where: str) -> tuple[int, ...]:
    """The published rule for a file without ids: evenly spaced from layer 1 to the fourth last."""
    if target_layers < 4:
        raise CheckpointError(f"{where}: no `target_layer_ids`, and no `num_target_layers`")
    if num_layers == 1:
        return (target_layers // 2,)
    step = (target_layers - 4) / (num_layers - 1)
    return tuple(round(1 + number * step) for number in range(num_layers))


def _ids(raw: Mapping[str, Any], key: str, where: str, *, low: int) -> tuple[int, ...]:
    found = Keys(raw, where).ids(key, high=MAX_LAYER_ID)
    if not 1 <= len(found) <= MAX_TAPS or min(found) < low or len(set(found)) != len(found):
        raise CheckpointError(
            f"{where}: key `{key}`: expected 1..{MAX_TAPS} different layers from {low} on, "
            f"found {list(found)[:MAX_TAPS]}"
        )
    return found


def _optional_flag(keys: Keys, raw: Mapping[str, Any], key: str) -> bool | None:
    return None if raw.get(key) is None else keys.flag(key, default=False)


def _agreed(
    key: str, flat: Keys, nested: Keys, where: str, *, low: int = 1, high: int
) -> int | None:
    """A key that may stand at top level, in `dflash_config`, or in both with one value."""
    outer = flat.optional_integer(key, low=low, high=high)
    inner = nested.optional_integer(key, low=low, high=high)
    if None not in (outer, inner) and outer != inner:
        raise CheckpointError(f"{where}: `{key}` is {outer}, but dflash_config says {inner}")
    return outer if inner is None else inner


def _required(key: str, flat: Keys, nested: Keys, where: str, *, low: int, high: int) -> int:
    value = _agreed(key, flat, nested, where, low=low, high=high)
    if value is None:
        raise CheckpointError(f"{where}: key `{key}` is missing, here and in dflash_config")
    return value


def _ignored(raw: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(sorted(raw.keys() - READ - REFUSED.keys()))
