"""``z-lab``: flat Qwen3-style keys, and ``dflash_config`` with what is DFlash's own.

Old files have some of the latter at top level, and files converted for other engines have all of
them there. Where a key stands at both places, they must agree. A network is named by
``architectures``, by ``projector_type``, or by its own keys.
"""

from typing import Any, Final

from protocol.checkpoints.dialects.base import Dialect, Raw
from protocol.checkpoints.dialects.shape import (
    MAX_BLOCK,
    MAX_DIMENSION,
    MAX_LAYER_ID,
    MAX_LAYERS,
    MAX_POSITIONS,
    SLIDING,
    ids,
    ignored,
    layer_types,
    optional_flag,
    rules,
    shape,
    window,
)
from protocol.checkpoints.draft_facts import DraftCheckpointConfig
from protocol.checkpoints.draft_networks import anchors, network_of, read_options
from protocol.checkpoints.draft_variants import refuse_unknown, refuse_variants
from protocol.checkpoints.keys import Keys
from protocol.errors import CheckpointError


def _claims(raw: Raw) -> bool:
    return not {"transformer_layer_config", "speculators_model_type"} & raw.keys()


def _convert(raw: Raw, where: str) -> DraftCheckpointConfig:
    flat = Keys(raw, where)
    inside = flat.mapping("dflash_config")
    nested = Keys(inside, f"{where}: dflash_config")
    names = [
        *(("architectures", name) for name in flat.texts("architectures")),
        ("projector_type", flat.optional_text("projector_type")),
        ("dflash_config.projector_type", nested.optional_text("projector_type")),
    ]
    network = network_of(names, (inside, raw), where)
    options, known = read_options(network, (inside, raw), where)
    refuse_variants({"": raw, "dflash_config.": inside}, known, where)
    refuse_unknown(inside, known, where)
    fields = shape(flat, where)
    types = layer_types(flat, flat.integer("num_hidden_layers", high=MAX_LAYERS), where)
    layers = _agreed("num_target_layers", flat, nested, where, high=MAX_LAYER_ID) or 0
    return DraftCheckpointConfig(
        dialect=DIALECT.name,
        network=network,
        options=options,
        **fields,
        layers=rules(types, _window(flat, nested, where), _causal(raw, inside, where), where),
        block_size=_required("block_size", flat, nested, where, low=2, high=MAX_BLOCK),
        mask_token_id=_required("mask_token_id", flat, nested, where, low=0, high=MAX_DIMENSION),
        target_layer_ids=_taps(inside, raw, layers, len(types), where),
        num_target_layers=layers,
        sample_from_anchor=_anchored(network, flat, nested),
        embedding_scale=_factor(("input_embedding_scale",), (nested, flat), where, neutral=1.0),
        logit_scale=_factor(("output_multiplier", "logit_scale"), (nested, flat), where, 1.0),
        logit_softcap=_factor(("final_logit_softcapping",), (nested, flat), where, neutral=0.0),
        draft_vocab_size=flat.integer(
            "draft_vocab_size", high=fields["vocab_size"], default=fields["vocab_size"]
        ),
        ignored=ignored(raw, known),
    )


def _causal(raw: Raw, inside: dict[str, Any], where: str) -> bool | None:
    outer = optional_flag(Keys(raw, where), raw, "is_causal")
    return optional_flag(Keys(inside, where), inside, "causal") if outer is None else outer


def _anchored(network: str, flat: Keys, nested: Keys) -> bool:
    default = flat.flag("sample_from_anchor", default=anchors(network))
    return nested.flag("sample_from_anchor", default=default)


def _window(flat: Keys, nested: Keys, where: str) -> int | None:
    own = nested.optional_integer("swa_window_size", high=MAX_POSITIONS)
    types = flat.texts("layer_types")
    if nested.flag("use_swa", default=SLIDING in types) != (SLIDING in types):
        raise CheckpointError(f"{where}: dflash_config.use_swa contradicts `layer_types`")
    return window(flat) if own is None else own


def _taps(
    inside: dict[str, Any], raw: Raw, target_layers: int, num_layers: int, where: str
) -> tuple[int, ...]:
    holder = inside if inside.get("target_layer_ids") is not None else raw
    inputs_key = "eagle_aux_hidden_state_layer_ids"
    outputs = None
    if raw.get(inputs_key) is not None:
        outputs = tuple(number - 1 for number in ids(raw, inputs_key, where, low=1))
    if holder.get("target_layer_ids") is None:
        return outputs or _default_taps(target_layers, num_layers, where)
    taps = ids(holder, "target_layer_ids", where, low=0)
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


def _factor(names: tuple[str, ...], parts: tuple[Keys, ...], where: str, neutral: float) -> float:
    """A number that is said under one of several names; `neutral` where it is not, or 0 is."""
    stated = [part.optional_number(name, low=0.0) for part in parts for name in names]
    found = sorted({value for value in stated if value})
    if len(found) > 1:
        raise CheckpointError(f"{where}: `{names[0]}` is both {found[0]} and {found[1]}")
    return found[0] if found else neutral


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


DIALECT: Final = Dialect("z-lab", _claims, _convert)
