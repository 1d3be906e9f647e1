"""A draft checkpoint's facts in one canonical form, whatever dialect published them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LayerRule:
    """How one layer's block rows attend.

    `causal`: block rows see only block rows at or before their own position. `window`: tokens
    that a row sees, itself included; 0 for all.
    """

    causal: bool
    window: int


@dataclass(frozen=True, slots=True)
class DraftCheckpointConfig:
    """One draft network; `target_layer_ids` are layer *outputs*, as everywhere in this program."""

    dialect: str  # of protocol.checkpoints.dialects
    network: str  # module of draft_daemon.models
    options: Mapping[str, int | bool | str]  # of this network alone: see its PUBLISHED
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_bias: bool
    layers: tuple[LayerRule, ...]
    rope_theta: float
    rope_scaling: Mapping[str, Any]  # empty: none
    max_positions: int
    vocab_size: int  # rows of the target's embedding table
    draft_vocab_size: int  # below vocab_size: the checkpoint brings its own head and id map
    mask_token_id: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int  # 0: the checkpoint does not say
    sample_from_anchor: bool
    embedding_scale: float
    logit_scale: float  # of the draft's own: its scores are the head's, times this,
    logit_softcap: float  # and then ``cap * tanh(score / cap)``; 0: none
    ignored: tuple[str, ...]  # keys of config.json that were left out

    @property
    def feature_width(self) -> int:
        """Elements of a feature row."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def first_slot(self) -> int:
        """The row of a block that predicts the token behind `pending`; later ones follow it."""
        return 0 if self.sample_from_anchor or self.options.get("shift_label") else 1

    @property
    def max_proposals(self) -> int:
        """Tokens one whole block can propose."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def reduced_vocabulary(self) -> bool:
        """Whether the draft scores its own list of tokens with a head of its own."""
        return self.draft_vocab_size != self.vocab_size
