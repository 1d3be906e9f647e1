"""``speculators``: the network under ``transformer_layer_config``, the rest at top level.

Its layer ids count layer *inputs*, one higher than everybody else's, and its drafts may have a
vocabulary of their own, with tensors ``t2d`` and ``d2t``. The kinds of layers and their window
stand with the network, or at top level.
"""

from collections.abc import Mapping
from typing import Any, Final

from protocol.checkpoints.dialects.base import Dialect, Raw
from protocol.checkpoints.dialects.shape import (
    MAX_BLOCK,
    MAX_DIMENSION,
    MAX_LAYERS,
    ids,
    ignored,
    layer_types,
    rules,
    shape,
    window,
)
from protocol.checkpoints.draft_facts import DraftCheckpointConfig
from protocol.checkpoints.draft_networks import anchors, network_of, read_options
from protocol.checkpoints.draft_variants import refuse_variants
from protocol.checkpoints.keys import Keys
from protocol.errors import CheckpointError, UnsupportedModel

INNER: Final = "transformer_layer_config"
EITHER: Final = ("layer_types", "sliding_window", "use_sliding_window")
KIND: Final = "speculators_model_type"


def _claims(raw: Raw) -> bool:
    return bool({INNER, KIND} & raw.keys())


def _convert(raw: Raw, where: str) -> DraftCheckpointConfig:
    keys = Keys(raw, where)
    layer = _layer(raw, keys.mapping(INNER), where)
    inner = Keys(layer, f"{where}: {INNER}")
    named = [("architectures", name) for name in keys.texts("architectures")]
    network = network_of([*named, (KIND, keys.optional_text(KIND))], (raw,), where)
    options, known = read_options(network, (raw,), where)
    refuse_variants({"": raw, f"{INNER}.": layer}, known, where)
    fields = shape(inner, where)
    wanted = keys.integer("target_hidden_size", high=MAX_DIMENSION, default=fields["hidden_size"])
    if wanted != fields["hidden_size"]:
        raise UnsupportedModel(
            f"{where}: target_hidden_size {wanted} is not hidden_size {fields['hidden_size']}; a "
            "draft of another width than its target's is not supported"
        )
    types = layer_types(inner, inner.integer("num_hidden_layers", high=MAX_LAYERS), where)
    # In this dialect the flag is about sliding layers alone; full ones are always bidirectional.
    bidirectional = keys.flag("sliding_window_non_causal", default=False)
    inputs = ids(raw, "aux_hidden_state_layer_ids", where, low=1)
    return DraftCheckpointConfig(
        dialect=DIALECT.name,
        network=network,
        options=options,
        **fields,
        layers=rules(types, window(inner), False if bidirectional else None, where),
        block_size=keys.integer("block_size", low=2, high=MAX_BLOCK),
        mask_token_id=keys.integer("mask_token_id", low=0, high=MAX_DIMENSION),
        # The input of layer i + 1 is the output of layer i.
        target_layer_ids=tuple(number - 1 for number in inputs),
        num_target_layers=0,
        sample_from_anchor=keys.flag("sample_from_anchor", default=_anchored(keys, network, where)),
        embedding_scale=1.0,
        logit_scale=1.0,
        logit_softcap=0.0,
        draft_vocab_size=keys.integer(
            "draft_vocab_size", high=fields["vocab_size"], default=fields["vocab_size"]
        ),
        ignored=tuple(sorted({*ignored(raw, known), *ignored(layer, known)})),
    )


def _layer(raw: Raw, inner: dict[str, Any], where: str) -> dict[str, Any]:
    """The network's keys, with those that the file may state at top level in their place."""
    for key in EITHER:
        outer = raw.get(key)
        if outer is None:
            continue
        if inner.get(key) not in (None, outer):
            raise CheckpointError(f"{where}: `{key}` is {outer}, but {INNER} says {inner[key]}")
        inner[key] = outer
    return inner


def _anchored(keys: Keys, network: str, where: str) -> bool:
    """Whether every row predicts, in a file that does not say so outright.

    The flag is younger than the first DSpark files: what these propose is then one token less than
    a block has rows, where the pending token's row predicts nothing.
    """
    methods = keys.mapping("speculators_config").get("proposal_methods")
    for method in methods if isinstance(methods, list) else ():
        if isinstance(method, Mapping):
            inner = Keys(method, f"{where}: speculators_config.proposal_methods")
            tokens = inner.optional_integer("speculative_tokens", high=MAX_BLOCK)
            block = keys.integer("block_size", low=2, high=MAX_BLOCK)
            if tokens in (block, block - 1):
                return tokens == block
    return anchors(network)


DIALECT: Final = Dialect("speculators", _claims, _convert)
