"""``gguf-lucebox``: what the lucebox converter writes, and older forks of llama.cpp.

Architectures ``qwen35-dflash-draft`` and ``dflash-draft``, with DFlash's own keys below
``<architecture>.dflash``; layer ids are z-lab's. Its Domino head has biases and a learned first
state, which the published one has not, and is refused.
"""

from typing import Any, Final

from protocol.checkpoints.dialects import gguf_shape
from protocol.checkpoints.dialects.base import GGUFDialect, GGUFFacts
from protocol.checkpoints.dialects.shape import MAX_BLOCK
from protocol.checkpoints.gguf import LAYER
from protocol.checkpoints.gguf_config import Metadata
from protocol.errors import CheckpointError, UnsupportedModel

ARCHITECTURES: Final = ("qwen35-dflash-draft", "dflash-draft")
DOMINO: Final = ("enabled", "gru_hidden_dim", "emb_dim", "vocab_size")
DSPARK: Final = ("enabled", "markov_rank", "vocab_size", "confidence_dim", "confidence.enabled")
KNOWN: Final = frozenset(
    (
        "dflash.block_size",
        "dflash.mask_token_id",
        "dflash.target_layer_ids",
        "dflash.n_target_layers",
        "dflash.n_target_features",
        "dflash.context_kv_layer_norm",
        *(f"dflash.domino.{key}" for key in DOMINO),
        *(f"dflash.dspark.{key}" for key in DSPARK),
    )
)
TOP: Final = {
    "dflash.fc.weight": "fc.weight",
    "dflash_fc.weight": "fc.weight",
    "dflash.hidden_norm.weight": "hidden_norm.weight",
    "dflash_hidden_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    "dflash.dspark.markov.w1": "markov_head.markov_w1.weight",
    "dflash.dspark.markov.w2": "markov_head.markov_w2.weight",
    "dflash.dspark.confidence.weight": "confidence_head.proj.weight",
    "dflash.dspark.confidence.bias": "confidence_head.proj.bias",
}
FORMER_NORM: Final = {"post_attention_norm.weight": "post_attention_layernorm.weight"}


def _config(facts: GGUFFacts) -> dict[str, Any]:
    architecture = str(facts.metadata["general.architecture"])
    keys = gguf_shape.check_keys(facts, architecture, KNOWN)
    for key, what in (
        ("dflash.domino.enabled", "a Domino head with biases and a learned first state"),
        ("dflash.context_kv_layer_norm", "a norm of its own on context keys and values"),
    ):
        if keys.raw(key):
            raise UnsupportedModel(
                f"{facts.where}: `{architecture}.{key}` asks for {what}, which is not supported"
            )
    found = gguf_shape.shape(keys, facts)
    name, own = _head(keys, found["hidden_size"])
    own |= {
        "target_layer_ids": keys.raw("dflash.target_layer_ids"),
        "mask_token_id": keys.raw("dflash.mask_token_id"),
    }
    if not own["target_layer_ids"]:
        raise CheckpointError(
            f"{facts.where}: {architecture}.dflash.target_layer_ids is missing; which layers the "
            "draft was made for is never guessed"
        )
    return found | {
        "architectures": [name],
        "block_size": keys.integer("dflash.block_size", MAX_BLOCK),
        "dflash_config": own,
    }


def _head(keys: Metadata, hidden: int) -> tuple[str, dict[str, Any]]:
    """The published name of the network, and the options of its head."""
    if not keys.raw("dflash.dspark.enabled"):
        return "DFlashDraftModel", {}
    rank = keys.integer("dflash.dspark.markov_rank")
    confident = bool(keys.raw("dflash.dspark.confidence.enabled"))
    inputs = keys.integer("dflash.dspark.confidence_dim", default=hidden + rank)
    return "DSparkDraftModel", {
        "markov_rank": rank,
        "enable_confidence_head": confident,
        "confidence_head_with_markov": confident and inputs == hidden + rank,
    }


GGUF: Final = GGUFDialect(
    name="gguf-lucebox",
    architectures=ARCHITECTURES,
    config=_config,
    top=TOP,
    layer={f"{one}.weight": f"{other}.weight" for one, other in LAYER.items()} | FORMER_NORM,
)
