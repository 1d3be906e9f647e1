"""What a decoder of Gated DeltaNet and attention layers states beyond the general facts.

Whatever would change the arithmetic and is not done here is refused by the key's name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from protocol.checkpoints.json_file import read_json
from protocol.checkpoints.keys import Keys
from protocol.checkpoints.target_config import CONFIG_FILE, MAX_DIMENSION, ModelConfig
from protocol.errors import CheckpointError, UnsupportedModel

LINEAR: Final = "linear_attention"
FULL: Final = "full_attention"
INTERVAL: Final = 4  # of full attention layers, where `layer_types` is left out
ROTARY: Final = 0.25  # part of a head that is rotated, where the config does not say
# Keys that change the arithmetic, with the one value (besides null) under which they do not.
NEUTRAL: Final[Mapping[str, object]] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attn_output_gate": True,
    "mlp_bias": False,
    "num_experts": 0,
    "use_sliding_window": False,
    "sliding_window": None,
    "final_logit_softcapping": None,
    "logits_scaling": 1.0,
}


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """The shapes of both kinds of layers."""

    layer_types: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    theta: float
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # taps of the convolution
    eps: float

    @property
    def keys(self) -> int:
        """Columns of all key heads, or of all query heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Columns of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def mixed(self) -> int:
        """Columns that the convolution runs over: query, key, value."""
        return 2 * self.keys + self.values


def read_hybrid_config(folder: Path, model: ModelConfig) -> HybridConfig:
    """Read the rest of config.json; raises CheckpointError or UnsupportedModel."""
    where, raw = str(folder / CONFIG_FILE), read_json(folder / CONFIG_FILE)
    raw = {**raw, **Keys(raw, where).mapping("text_config")}
    for key, neutral in NEUTRAL.items():
        if raw.get(key) is not None and raw[key] != neutral:
            raise UnsupportedModel(f"{where}: `{key}` is {raw[key]!r}, which is not supported")
    keys = Keys(raw, where)
    rope = _rope(keys, where)
    head_dim = keys.integer("head_dim", high=MAX_DIMENSION)
    rotary = int(head_dim * float(rope.get("partial_rotary_factor", ROTARY)))
    if not 0 < rotary <= head_dim or rotary % 2:
        raise CheckpointError(f"{where}: {rotary} of {head_dim} dimensions cannot be rotated")
    found = HybridConfig(
        layer_types=_layer_types(keys, model.num_layers, where),
        heads=keys.integer("num_attention_heads", high=MAX_DIMENSION),
        kv_heads=keys.integer("num_key_value_heads", high=MAX_DIMENSION),
        head_dim=head_dim,
        rotary_dim=rotary,
        theta=Keys(rope, where).number("rope_theta"),
        key_heads=keys.integer("linear_num_key_heads", high=MAX_DIMENSION),
        value_heads=keys.integer("linear_num_value_heads", high=MAX_DIMENSION),
        key_dim=keys.integer("linear_key_head_dim", high=MAX_DIMENSION),
        value_dim=keys.integer("linear_value_head_dim", high=MAX_DIMENSION),
        kernel=keys.integer("linear_conv_kernel_dim", low=2, high=64),
        eps=keys.number("rms_norm_eps"),
    )
    if found.heads % found.kv_heads or found.value_heads % found.key_heads:
        raise CheckpointError(
            f"{where}: {found.heads} heads over {found.kv_heads}, {found.value_heads} value heads "
            f"over {found.key_heads}: no whole groups"
        )
    return found


def _rope(keys: Keys, where: str) -> dict[str, Any]:
    rope = keys.mapping("rope_parameters")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or keys.mapping("rope_scaling"):
        raise UnsupportedModel(f"{where}: RoPE scaling {kind!r} is not supported here")
    return {"rope_theta": keys.optional_number("rope_theta"), **rope}


def _layer_types(keys: Keys, layers: int, where: str) -> tuple[str, ...]:
    interval = keys.integer("full_attention_interval", default=INTERVAL)
    types = keys.texts("layer_types") or tuple(
        LINEAR if (index + 1) % interval else FULL for index in range(layers)
    )
    if len(types) != layers or not {*types} <= {LINEAR, FULL}:
        raise CheckpointError(f"{where}: {len(types)} `layer_types` {sorted({*types})}, {layers}")
    if FULL not in types:
        raise UnsupportedModel(f"{where}: no `layer_types` entry is {FULL}")
    return types
