"""A target's `config.json` as one frozen struct, read without torch.

Both daemons' owner and the target read it. Whatever would change the arithmetic and is not
implemented is refused by the key's name; an unknown key that changes nothing is let pass. Facts
that only a family can decide (what an absent `rope_theta` means, which layers are windowed) stay
as the file states them; `target_daemon.families` resolves them.

That holds for `DENSE_TYPES`. Of any other model only the general facts are read, under the names
that are in use; the arithmetic is its family's affair.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from protocol.checkpoints import gguf, rope_keys
from protocol.checkpoints.json_file import read_json
from protocol.checkpoints.keys import Keys
from protocol.errors import CheckpointError, UnsupportedModel

CONFIG_FILE: Final = "config.json"
GENERATION_FILE: Final = "generation_config.json"
MAX_DIMENSION: Final = 1 << 24
MAX_LAYERS: Final = 4096

# Keys that change the arithmetic, with the one value (besides null) under which they do not.
NEUTRAL: Final[Mapping[str, object]] = {
    "hidden_act": "silu",
    "hidden_activation": "silu",
    "partial_rotary_factor": 1.0,
    "is_encoder_decoder": False,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "attention_multiplier": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "clip_qkv": None,
    "qk_layernorm": False,
    "use_qk_norm": False,
    "no_rope_layers": None,
    "num_experts": 0,
    "num_local_experts": 0,
    "quantization_config": None,
}

# Names of stored types, as `torch` spells them; loading says which of them can be read.
DTYPES: Final = (
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "half",
    "float",
    "double",
    "float8_e4m3fn",
    "float8_e5m2",
    "auto",
)

# Types whose config.json is held to every key that the dense decoder knows.
DENSE_TYPES: Final = frozenset({"llama", "mistral", "qwen2", "qwen3"})
# Keys under which any other model is refused, since no family could run it.
NEUTRAL_ANYWHERE: Final[Mapping[str, object]] = {
    "is_encoder_decoder": False,
    "quantization_config": None,
}
CODE: Final = ("AutoModel", "AutoConfig")  # entries of `auto_map` that a loader would run
# The names under which published configs state the same fact.
HIDDEN: Final = ("hidden_size", "n_embd", "d_model")
LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads")
POSITIONS: Final = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "n_ctx",
    "seq_length",
    "max_sequence_length",
)
INNER: Final = ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size")
UNSTATED_POSITIONS: Final = 8192  # of a recurrent model, whose context has no end of its own


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one decoder, under the names of `config.json`."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float | None  # None: the file does not say
    rope_scaling: dict[str, Any]  # empty: none
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    sliding_window: int | None
    states_sliding_window: bool  # whether the key is there, be it null
    use_sliding_window: bool
    max_window_layers: int | None
    layer_types: tuple[str, ...]  # empty: the file does not say
    eos_token_ids: tuple[int, ...]
    dtype: str | None  # "bfloat16", "float16", "float32"; None: the file does not say
    dense: bool = True  # False: of what follows a width or a head count, 0 means "not stated"


def read_model_config(path: Path, *, dense: bool = False) -> ModelConfig:
    """Read a folder's config.json or a GGUF file's metadata.

    With `dense`, a config of any type is held to the keys of `DENSE_TYPES`.

    Raises CheckpointError with file and key where something is missing or misshapen, and
    UnsupportedModel naming the key that asks for arithmetic this program does not do.
    """
    if path.is_dir():
        raw = read_json(path / CONFIG_FILE)
        generation = path / GENERATION_FILE
        extra = read_json(generation) if generation.exists() else {}
        return parse_model_config(raw, extra, where=str(path / CONFIG_FILE), dense=dense)
    if path.is_file():
        return parse_model_config(gguf.GGUFModel(path).config(), {}, where=str(path))
    raise CheckpointError(f"{path}: no such folder or file")


def parse_model_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any], *, where: str, dense: bool = False
) -> ModelConfig:
    """Turn the decoded `config.json` and `generation_config.json` into the struct."""
    keys = Keys(raw, where)
    if not dense and keys.text("model_type") not in DENSE_TYPES:
        return _parse_general(raw, generation, where=where)
    _refuse(raw, NEUTRAL, where)
    heads = keys.integer("num_attention_heads", high=MAX_DIMENSION)
    kv_heads = keys.integer("num_key_value_heads", default=heads, high=heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{where}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    hidden = keys.integer("hidden_size", high=MAX_DIMENSION)
    layers = keys.integer("num_hidden_layers", high=MAX_LAYERS)
    theta, scaling = _rope(keys, where)
    vocab = keys.integer("vocab_size", high=MAX_DIMENSION)
    return ModelConfig(
        model_type=keys.text("model_type"),
        hidden_size=hidden,
        intermediate_size=keys.integer("intermediate_size", high=MAX_DIMENSION),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(keys, hidden, heads, where),
        vocab_size=vocab,
        max_positions=keys.integer("max_position_embeddings", high=1 << 31),
        rms_norm_eps=keys.number("rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=keys.flag("tie_word_embeddings", default=False),
        attention_bias=keys.flag("attention_bias", default=False),
        mlp_bias=keys.flag("mlp_bias", default=False),
        sliding_window=keys.optional_integer("sliding_window", high=1 << 31),
        states_sliding_window="sliding_window" in raw,
        use_sliding_window=keys.flag("use_sliding_window", default=False),
        max_window_layers=keys.optional_integer("max_window_layers", low=0, high=MAX_LAYERS),
        layer_types=_layer_types(keys, layers, where),
        eos_token_ids=_eos(keys, Keys(generation, where), vocab),
        dtype=_dtype(keys),
    )


def _parse_general(
    raw: Mapping[str, Any], generation: Mapping[str, Any], *, where: str
) -> ModelConfig:
    """The facts that any decoder has; of a model with several parts, those of its text."""
    outer = Keys(raw, where)
    text = outer.mapping("text_config")
    for part in (raw, text):
        _refuse(part, NEUTRAL_ANYWHERE, where)
    keys = Keys({**raw, **text}, where)
    hidden = keys.integer(keys.named(HIDDEN), high=MAX_DIMENSION)
    heads = keys.optional_integer(keys.named(HEADS), low=0, high=MAX_DIMENSION) or 0
    kv_heads = keys.optional_integer("num_key_value_heads", high=MAX_DIMENSION) or heads
    dim = keys.optional_integer("head_dim", high=MAX_DIMENSION)
    layers = keys.integer(keys.named(LAYERS), high=MAX_LAYERS)
    vocab = keys.integer("vocab_size", high=MAX_DIMENSION)
    theta = keys.mapping("rope_parameters").get("rope_theta", {**raw, **text}.get("rope_theta"))
    return ModelConfig(
        model_type=outer.text("model_type"),
        hidden_size=hidden,
        intermediate_size=keys.optional_integer(keys.named(INNER), high=MAX_DIMENSION) or 0,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim or (hidden // heads if heads else 0),
        vocab_size=vocab,
        max_positions=keys.integer(keys.named(POSITIONS), high=1 << 31, default=UNSTATED_POSITIONS),
        rms_norm_eps=0.0,
        rope_theta=Keys({"rope_theta": theta}, where).optional_number("rope_theta"),
        rope_scaling={},
        tied=keys.flag("tie_word_embeddings", default=False),
        attention_bias=False,
        mlp_bias=False,
        sliding_window=None,
        states_sliding_window="sliding_window" in raw,
        use_sliding_window=False,
        max_window_layers=None,
        layer_types=(),
        eos_token_ids=_eos(keys, Keys(generation, where), vocab),
        dtype=_dtype(keys),
        dense=False,
    )


def _refuse(raw: Mapping[str, Any], neutral_values: Mapping[str, object], where: str) -> None:
    for key, neutral in neutral_values.items():
        value = raw.get(key)
        if value is not None and value != neutral:
            raise UnsupportedModel(f"{where}: `{key}` is {_short(value)}, which is not supported")
    mapped = raw.get("auto_map")
    if isinstance(mapped, Mapping) and any(str(key).startswith(CODE) for key in mapped):
        raise UnsupportedModel(
            f"{where}: `auto_map` names code of the checkpoint's own, which is never run"
        )


def _head_dim(keys: Keys, hidden: int, heads: int, where: str) -> int:
    stated = keys.optional_integer("head_dim", high=MAX_DIMENSION)
    if stated is None and hidden % heads:
        raise CheckpointError(
            f"{where}: no `head_dim`, and hidden_size {hidden} is no multiple of {heads} heads"
        )
    dim = stated or hidden // heads
    if dim % 2:
        raise CheckpointError(f"{where}: head_dim {dim} is odd; rotary positions need pairs")
    return dim


def _rope(keys: Keys, where: str) -> tuple[float | None, dict[str, Any]]:
    """Theta and scaling from `rope_parameters` (new) or `rope_theta` + `rope_scaling` (old)."""
    new = keys.mapping("rope_parameters")
    old = keys.mapping("rope_scaling")
    if new and any(isinstance(value, Mapping) for value in new.values()):
        raise UnsupportedModel(f"{where}: `rope_parameters` differ by layer type; not supported")
    scaling = {**old, **new}
    inner = Keys(scaling, f"{where}: rope_parameters")
    theta = inner.optional_number("rope_theta")
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"{where}: `partial_rotary_factor` is not supported")
    outer = keys.optional_number("rope_theta")
    if theta is not None and outer is not None and theta != outer:
        raise CheckpointError(
            f"{where}: rope_theta is {outer}, but rope_parameters say {theta}; which one?"
        )
    return (theta if theta is not None else outer), rope_keys.scaling(inner, where)


def _layer_types(keys: Keys, layers: int, where: str) -> tuple[str, ...]:
    types = keys.texts("layer_types")
    if types and len(types) != layers:
        raise CheckpointError(
            f"{where}: `layer_types` has {len(types)} entries for {layers} layers"
        )
    return types


def _dtype(keys: Keys) -> str | None:
    """What the weights are stored in, under both names that are in use."""
    for name in ("dtype", "torch_dtype"):
        stated = keys.choice(name, DTYPES)
        if stated is not None:
            return stated
    return None


def _eos(config: Keys, generation: Keys, vocab: int) -> tuple[int, ...]:
    """Ids that end a text; generation_config.json overrides config.json, as elsewhere."""
    return generation.ids("eos_token_id", high=vocab - 1) or config.ids(
        "eos_token_id", high=vocab - 1
    )


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
