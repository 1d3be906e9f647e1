"""GGUF metadata -> the `config.json` of the same model, and the tensors such a model has.

Metadata keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What would change the
arithmetic and cannot be expressed is refused by name, never dropped.
"""

from collections.abc import Mapping, Sequence
from math import isclose, isfinite, pi
from typing import Any, Final

import msgspec

from protocol.errors import CheckpointError, UnsupportedModel

# architecture -> (architectures entry, q/k/v biases are part of the family, q/k norms)
ARCHITECTURES: Final[Mapping[str, tuple[str, bool, bool]]] = {
    "llama": ("LlamaForCausalLM", False, False),
    "qwen2": ("Qwen2ForCausalLM", True, False),
    "qwen3": ("Qwen3ForCausalLM", False, True),
}
MAX_DIM: Final = 1 << 24
MAX_LAYERS: Final = 4096
# Fixed in llama.cpp's converter for Llama 3.x: only the factors it computes are in the file.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT = 1.0, 4.0, 8192
_BIASES: Final = ("attn_q.bias", "attn_k.bias", "attn_v.bias")


class Facts(msgspec.Struct, frozen=True):
    """What the header says about the network."""

    architecture: str
    layers: int
    config: dict[str, Any]
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of such a model under its Hugging Face name, with its shape."""
        config = self.config
        hidden, inner, dim = (
            int(config[key]) for key in ("hidden_size", "intermediate_size", "head_dim")
        )
        queries = int(config["num_attention_heads"]) * dim
        keys = int(config["num_key_value_heads"]) * dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if self.qkv_bias:
            layer |= {
                "self_attn.q_proj.bias": (queries,),
                "self_attn.k_proj.bias": (keys,),
                "self_attn.v_proj.bias": (keys,),
            }
        if self.output_bias:
            layer["self_attn.o_proj.bias"] = (hidden,)
        if self.qk_norm:
            layer |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
        vocab = int(config["vocab_size"])
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (vocab, hidden),
            "model.norm.weight": (hidden,),
        }
        if not config["tie_word_embeddings"]:
            shapes["lm_head.weight"] = (vocab, hidden)
        for index in range(self.layers):
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
        return shapes


class Metadata:
    """Typed, bounded access to the keys of one architecture."""

    def __init__(self, values: Mapping[str, Any], prefix: str, where: str) -> None:
        self.values = values
        self.prefix = prefix
        self.where = where

    def raw(self, key: str) -> Any:
        return self.values.get(f"{self.prefix}.{key}")

    def integer(self, key: str, high: int = MAX_DIM, default: int | None = None) -> int:
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value <= high:
            shown = f"{len(value)} values" if isinstance(value, list) else repr(value)
            raise CheckpointError(
                f"{self.where}: {self.prefix}.{key} is {shown}; an integer 1..{high} is needed"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, (int, float)) or not isfinite(value) or value <= 0:
            raise CheckpointError(
                f"{self.where}: {self.prefix}.{key} is {value!r}; a positive number is needed"
            )
        return float(value)


def facts_of(
    metadata: Mapping[str, Any],
    tensors: frozenset[str],
    rope_factors: Sequence[float] | None,
    *,
    where: str,
) -> Facts:
    """Read the network's facts; `rope_factors` is the content of `rope_freqs.weight`, if any."""
    architecture = str(metadata.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(
            f"{where}: architecture {architecture!r} is not supported in GGUF files; these are: "
            f"{known}"
        )
    keys = Metadata(metadata, architecture, where)
    _refuse_experts(keys)
    class_name, _, qk_norm = ARCHITECTURES[architecture]
    qkv_bias = any(f"blk.0.{name}" in tensors for name in _BIASES)
    output_bias = "blk.0.attn_output.bias" in tensors
    layers = keys.integer("block_count", MAX_LAYERS)
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": architecture,
        **_dimensions(keys, layers),
        "hidden_act": "silu",
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": "bfloat16",
    }
    config |= _rope(keys, config["head_dim"], rope_factors)
    config |= _window(keys, config)
    config |= special_ids(metadata, config["vocab_size"], where)
    if architecture != "qwen2":
        if qkv_bias != output_bias and qkv_bias:
            raise UnsupportedModel(f"{where}: biases on q, k and v alone in a {architecture} model")
        config["attention_bias"] = qkv_bias
    return Facts(architecture, layers, config, qkv_bias, output_bias, qk_norm)


def special_ids(metadata: Mapping[str, Any], vocab: int, where: str) -> dict[str, int]:
    """bos/eos/pad ids that the file states, each inside the vocabulary."""
    ids = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is None:
            continue
        if type(value) is not int or not 0 <= value < vocab:
            raise CheckpointError(
                f"{where}: tokenizer.ggml.{key}_token_id is {value!r}, outside 0..{vocab - 1}"
            )
        ids[f"{name}_token_id"] = value
    return ids


def _dimensions(keys: Metadata, layers: int) -> dict[str, int]:
    hidden = keys.integer("embedding_length")
    heads = keys.integer("attention.head_count")
    rotary = keys.raw("rope.dimension_count")
    head_dim = keys.integer("attention.key_length", default=rotary or hidden // heads)
    value_dim = keys.integer("attention.value_length", default=head_dim)
    if (rotary or head_dim) != head_dim or value_dim != head_dim:
        raise UnsupportedModel(
            f"{keys.where}: heads of {head_dim} with {rotary} rotary and {value_dim} value "
            "dimensions; they must be equal"
        )
    tokens = keys.values.get("tokenizer.ggml.tokens")
    stated = len(tokens) if isinstance(tokens, list) and tokens else None
    return {
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads, default=heads),
        "head_dim": head_dim,
        "vocab_size": keys.integer("vocab_size", default=stated),
        "max_position_embeddings": keys.integer("context_length", 1 << 31),
    }


def _rope(keys: Metadata, head_dim: int, factors: Sequence[float] | None) -> dict[str, Any]:
    theta = keys.number("rope.freq_base", default=10000.0)
    rope: dict[str, Any] = {"rope_theta": theta}
    kind = keys.raw("rope.scaling.type") or "none"
    if kind == "linear":
        rope["rope_scaling"] = {
            "rope_type": "linear",
            "factor": keys.number("rope.scaling.factor"),
        }
    elif kind != "none":
        raise UnsupportedModel(
            f"{keys.where}: RoPE scaling {kind!r} is not supported in GGUF files"
        )
    elif keys.raw("rope.scale_linear") not in (None, 1.0):
        raise UnsupportedModel(f"{keys.where}: rope.scale_linear is not supported")
    if factors is not None:
        rope["rope_scaling"] = _llama3_scaling(keys.where, theta, head_dim, factors)
    return rope


def _llama3_scaling(
    where: str, theta: float, head_dim: int, factors: Sequence[float]
) -> dict[str, Any]:
    """Llama 3.1's scaling, recovered from the factors per frequency that the file holds.

    The converter keeps only the result of its formula; the scaling is accepted when the formula,
    with the largest factor found and the constants every Llama 3.x uses, gives the same numbers.
    """
    factor = float(max(factors))
    expected = []
    for index in range(head_dim // 2):
        wavelength = 2 * pi * theta ** (2 * index / head_dim)
        smooth = (LLAMA3_CONTEXT / wavelength - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
        smooth = min(1.0, max(0.0, smooth))
        expected.append(1 / ((1 - smooth) / factor + smooth))
    matches = len(factors) == len(expected) and all(
        isclose(found, wanted, rel_tol=1e-4)
        for found, wanted in zip(factors, expected, strict=True)
    )
    if not matches:
        raise UnsupportedModel(
            f"{where}: the factors in rope_freqs.weight are not Llama 3's; not supported"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_CONTEXT,
    }


def _window(keys: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    if keys.raw("attention.sliding_window") is None:
        return {}
    window = keys.integer("attention.sliding_window", 1 << 31)
    if window >= int(config["max_position_embeddings"]):
        return {}
    # In llama.cpp a `llama` file with a window is a Mistral; Qwen2 turns its window on by a flag.
    if config["model_type"] == "llama":
        return {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": window,
        }
    return {"sliding_window": window, "use_sliding_window": True}


def _refuse_experts(keys: Metadata) -> None:
    count = keys.raw("expert_count")
    if count not in (None, 0):
        raise UnsupportedModel(f"{keys.where}: a mixture of {count} experts is not supported")
