"""``gguf-llama.cpp``: what llama.cpp's own converter writes (architecture ``dflash``).

``target_layers`` count layer inputs, one higher than z-lab's ids, and ``d2t`` holds the target's
ids themselves. Which heads there are, the tensors say. See ggml-org/llama.cpp#22105, #25110 and
#27342.
"""

from typing import Any, Final

from protocol.checkpoints.dialects import gguf_shape
from protocol.checkpoints.dialects.base import GGUFDialect, GGUFFacts
from protocol.checkpoints.dialects.shape import MAX_BLOCK, MAX_LAYER_ID
from protocol.checkpoints.gguf import LAYER
from protocol.checkpoints.gguf_config import Metadata
from protocol.errors import CheckpointError, UnsupportedModel

ARCHITECTURE: Final = "dflash"
MASK: Final = "tokenizer.ggml.mask_token_id"
DFLASH2: Final = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
FACTORS: Final = ("logit_scale", "final_logit_softcapping")
KNOWN: Final = frozenset(
    (
        "block_size",
        "target_layers",
        "sample_from_anchor",
        "attention.causal",
        "rope.dimension_sections",
        *FACTORS,
        *DFLASH2,
    )
)
TOP: Final = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    "token_embd.weight": "embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "d2t": "d2t",
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
    "selector_prev.weight": "candidate_selector.predecessor_codebook",
    "selector_next.weight": "candidate_selector.successor_codebook",
}
CONVOLUTIONS: Final = {
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj.weight": "attention_conv.kernel_projection.weight",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj.weight": "mlp_conv.kernel_projection.weight",
}


def _config(facts: GGUFFacts) -> dict[str, Any]:
    keys = gguf_shape.check_keys(facts, ARCHITECTURE, KNOWN)
    found = gguf_shape.shape(keys, facts)
    _check_rope(keys, found["head_dim"])
    if found["sliding_window"] and keys.raw("attention.sliding_window_pattern") is None:
        raise CheckpointError(f"{facts.where}: a sliding window, and no pattern of layers")
    name, own = _head(keys, facts, found["hidden_size"])
    own |= {"target_layer_ids": _taps(keys), "mask_token_id": facts.metadata.get(MASK)}
    own |= {key: keys.raw(key) for key in FACTORS if keys.raw(key) is not None}
    causal = keys.raw("attention.causal")
    if name == "DFlash2DraftModel" and causal is None:
        causal = False  # as all published DFlash2 drafts; the converter leaves the key out
    if "d2t" in facts.shapes:
        found["draft_vocab_size"] = facts.shapes["d2t"][0]
    return found | {
        "architectures": [name],
        "block_size": keys.integer("block_size", MAX_BLOCK),
        "is_causal": causal,
        "sample_from_anchor": keys.raw("sample_from_anchor"),
        "dflash_config": own,
    }


def _head(keys: Metadata, facts: GGUFFacts, hidden: int) -> tuple[str, dict[str, Any]]:
    """The published name of the network, and the options of its head."""
    if "selector_hidden.weight" in facts.shapes:
        return "DFlash2DraftModel", {key: keys.integer(key) for key in DFLASH2}
    if "markov_w1.weight" not in facts.shapes:
        return "DFlashDraftModel", {key: keys.raw(key) for key in DFLASH2 if keys.raw(key)}
    rank = facts.shapes["markov_w1.weight"][-1]
    inputs = facts.shapes.get("conf_proj.weight", (0,))[-1]
    return "DSparkDraftModel", {
        "markov_rank": rank,
        "enable_confidence_head": inputs > 0,
        "confidence_head_with_markov": inputs == hidden + rank,
    }


def _taps(keys: Metadata) -> list[int]:
    ids = keys.raw("target_layers")
    if not isinstance(ids, list) or not all(
        type(one) is int and 1 <= one <= MAX_LAYER_ID for one in ids
    ):
        raise CheckpointError(f"{keys.where}: {ARCHITECTURE}.target_layers is no list of layers")
    return [one - 1 for one in ids]


def _check_rope(keys: Metadata, head_dim: int) -> None:
    """Drafts of targets with several kinds of position use one of them, over the whole head."""
    sections = keys.raw("rope.dimension_sections")
    if sections is not None and (
        not isinstance(sections, list) or sections[:1] != [head_dim // 2] or any(sections[1:])
    ):
        raise UnsupportedModel(
            f"{keys.where}: `{ARCHITECTURE}.rope.dimension_sections` {str(sections)[:60]} asks for "
            "rotary positions of several kinds, which is not supported"
        )


GGUF: Final = GGUFDialect(
    name="gguf-llama.cpp",
    architectures=(ARCHITECTURE,),
    config=_config,
    top=TOP,
    layer={f"{one}.weight": f"{other}.weight" for one, other in LAYER.items()} | CONVOLUTIONS,
    offsets=False,
)
