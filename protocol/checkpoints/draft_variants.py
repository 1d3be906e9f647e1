"""Draft networks and options that exist in the field and are not run here, refused by name."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from protocol.checkpoints.keys import Keys
from protocol.errors import UnsupportedModel

ARCHITECTURES: Final = ("DFlashDraftModel", "DFlashSpeculator")
VARIANTS: Final = {  # architecture or projector type -> what it needs
    "DFlash2DraftModel": "DFlash2: grouped convolutions and a candidate selector",
    "DFlash2Speculator": "DFlash2: grouped convolutions and a candidate selector",
    "DSparkDraftModel": "DSpark: a Markov head and a confidence head",
    "DSparkSpeculator": "DSpark: a Markov head and a confidence head",
    "Qwen3DSparkModel": "DSpark: a Markov head and a confidence head",
    "DominoDraftModel": "Domino: a GRU over the tokens chosen in the block",
    "dspark": "DSpark: a Markov head and a confidence head",
    "domino": "Domino: a GRU over the tokens chosen in the block",
    "dflash2": "DFlash2: grouped convolutions and a candidate selector",
}


class Needs(NamedTuple):
    """A key that changes the network: values that do not, and what any other one asks for."""

    neutral: tuple[object, ...]
    what: str


DOMINO: Final = "Domino's GRU head"
REFUSED: Final[Mapping[str, Needs]] = {
    "markov_rank": Needs((0,), "DSpark's Markov head"),
    "enable_confidence_head": Needs((False,), "DSpark's confidence head"),
    "pure_draft_prefix_len": Needs((), DOMINO),
    "gru_hidden_dim": Needs((), DOMINO),
    "emb_dim": Needs((), DOMINO),
    "shift_label": Needs((False,), "Domino's shifted labels"),
    "conv_kernel_size": Needs((), "DFlash2's grouped convolutions"),
    "conv_group_size": Needs((), "DFlash2's grouped convolutions"),
    "selector_rank": Needs((), "DFlash2's candidate selector"),
    "selector_top_k": Needs((), "DFlash2's candidate selector"),
    "attention_sink_bias": Needs((False,), "attention sinks"),
    "attention_value_scale": Needs((1.0,), "scaled attention values"),
    "output_multiplier": Needs((1.0,), "a multiplier of the draft's own on its logits"),
    "logit_scale": Needs((1.0,), "a multiplier of the draft's own on its logits"),
    "final_logit_softcapping": Needs((0.0,), "a soft-cap of the draft's own on its logits"),
    "quantization_config": Needs((), "quantised draft weights"),
    "use_aux_hidden_state": Needs((True,), "a draft without target features"),
    "mask_embedding": Needs((False,), "a mask embedding of the draft's own"),
    "rope_interleaved": Needs((False,), "interleaved rotary positions"),
    "is_neox_style": Needs((True,), "interleaved rotary positions"),
    "partial_rotary_factor": Needs((1.0,), "rotary positions on a part of the head"),
    "hidden_act": Needs(("silu",), "another activation than SiLU"),
    "mlp_bias": Needs((False,), "biases in the MLP"),
    "hc_mult": Needs((1,), "hyper-connections"),
}
READ_NESTED: Final = frozenset(
    (
        "mask_token_id",
        "target_layer_ids",
        "num_target_layers",
        "block_size",
        "causal",
        "use_swa",
        "swa_window_size",
        "input_embedding_scale",
        "sample_from_anchor",
        "projector_type",
    )
)
# Known to change nothing in this network; anything else inside `dflash_config` is refused.
HARMLESS_NESTED: Final = frozenset(("mask_token", "attention_mode"))


def refuse_variants(raw: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedModel for the first name or key that this program does not run."""
    keys = Keys(raw, where)
    nested = keys.mapping("dflash_config")
    layer = keys.mapping("transformer_layer_config")
    named = [
        *keys.texts("architectures"),
        keys.optional_text("speculators_model_type"),
        Keys(nested, f"{where}: dflash_config").optional_text("projector_type"),
        keys.optional_text("projector_type"),
    ]
    for name in named:
        if name in VARIANTS:
            raise UnsupportedModel(f"{where}: {VARIANTS[name]}, which is not supported yet")
        if name is not None and name not in (*ARCHITECTURES, "dflash"):
            raise UnsupportedModel(f"{where}: {name!r} is no draft network that is known here")
    for part in (raw, nested, layer):
        for key, needs in REFUSED.items():
            value = part.get(key)
            if value is not None and value not in needs.neutral:
                raise UnsupportedModel(
                    f"{where}: `{key}` {str(value)[:60]} asks for {needs.what}, "
                    "which is not supported yet"
                )
    strange = sorted(nested.keys() - READ_NESTED - HARMLESS_NESTED - REFUSED.keys())
    if strange:
        raise UnsupportedModel(f"{where}: dflash_config: `{strange[0]}` is not known here")
