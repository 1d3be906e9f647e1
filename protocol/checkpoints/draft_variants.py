"""Options of drafts that exist in the field and are not run here, refused by name."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from protocol.errors import UnsupportedModel


class Needs(NamedTuple):
    """A key that changes the network: values that do not, and what any other one asks for."""

    neutral: tuple[object, ...]
    what: str


DOMINO: Final = "Domino's GRU head"
REFUSED: Final[Mapping[str, Needs]] = {
    # Of one network each: where that network is not the one at hand.
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
    # Of none that is run here.
    "attention_sink_bias": Needs((False,), "attention sinks"),
    "attention_value_scale": Needs((1.0,), "scaled attention values"),
    "quantization_config": Needs((), "quantised draft weights"),
    "use_aux_hidden_state": Needs((True,), "a draft without target features"),
    "mask_embedding": Needs((False,), "a mask embedding of the draft's own"),
    "rope_interleaved": Needs((False,), "interleaved rotary positions"),
    "is_neox_style": Needs((True,), "interleaved rotary positions"),
    "partial_rotary_factor": Needs((1.0,), "rotary positions on a part of the head"),
    "hidden_act": Needs(("silu",), "another activation than SiLU"),
    "attention_mode": Needs(("gqa", "mha"), "another attention than softmax over keys"),
    "mlp_bias": Needs((False,), "biases in the MLP"),
    "hc_mult": Needs((1,), "hyper-connections"),
    "num_experts": Needs((0,), "a mixture of experts in the draft"),
    "num_local_experts": Needs((0,), "a mixture of experts in the draft"),
    "n_routed_experts": Needs((0,), "a mixture of experts in the draft"),
    "q_lora_rank": Needs((), "latent attention in the draft"),
    "kv_lora_rank": Needs((), "latent attention in the draft"),
}
READ_NESTED: Final = frozenset(
    """
    mask_token_id target_layer_ids num_target_layers block_size causal use_swa swa_window_size
    input_embedding_scale sample_from_anchor projector_type output_multiplier
    final_logit_softcapping logit_scale
    """.split()  # noqa: SIM905 - a wall of quotes hides a missing one
)
# Known to change nothing in any network; anything else inside `dflash_config` is refused.
HARMLESS_NESTED: Final = frozenset(("mask_token",))


def refuse_variants(
    parts: Mapping[str, Mapping[str, Any]], options: frozenset[str], where: str
) -> None:
    """Raise UnsupportedModel for the first key of `parts` that asks for what is not run here.

    `options`: those of the network at hand.
    """
    for name, part in parts.items():
        for key, needs in REFUSED.items():
            value = None if key in options else part.get(key)
            if value is not None and value not in needs.neutral:
                raise UnsupportedModel(
                    f"{where}: `{name}{key}` {str(value)[:60]} asks for {needs.what}, "
                    "which is not supported"
                )


def refuse_unknown(nested: Mapping[str, Any], options: frozenset[str], where: str) -> None:
    """Raise UnsupportedModel for a key of `dflash_config` that nothing here reads.

    `options`: those of the network at hand.
    """
    known = READ_NESTED | HARMLESS_NESTED | REFUSED.keys() | options
    strange = sorted(nested.keys() - known)
    if strange:
        raise UnsupportedModel(f"{where}: dflash_config: `{strange[0]}` is not known here")
