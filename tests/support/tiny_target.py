"""Random tiny checkpoints, one per dense family, that `transformers` loads as well."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

BASE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Name -> config.json; every fact in which the families differ occurs in one of them.
FAMILIES: dict[str, dict] = {
    "smollm2": BASE
    | {
        "model_type": "llama",
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "hidden_size": 24,
        "rope_theta": 100000.0,
    },
    "llama2": BASE
    | {"model_type": "llama", "tie_word_embeddings": False, "num_key_value_heads": 4},
    "llama3": BASE
    | {
        "model_type": "llama",
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3_SCALING,
        "tie_word_embeddings": False,
    },
    "llama-linear": BASE
    | {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama-biased": BASE
    | {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "mistral": BASE
    | {"model_type": "mistral", "sliding_window": None, "tie_word_embeddings": False},
    "mistral-window": BASE | {"model_type": "mistral", "sliding_window": 11},
    "qwen2": BASE
    | {
        "model_type": "qwen2",
        "use_sliding_window": False,
        "sliding_window": 11,
        "max_window_layers": 2,
    },
    "qwen2-window": BASE
    | {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 11,
        "max_window_layers": 2,
        "tie_word_embeddings": False,
    },
    "qwen3": BASE
    | {
        "model_type": "qwen3",
        "head_dim": 16,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
    "qwen3-window": BASE
    | {
        "model_type": "qwen3",
        "head_dim": 16,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def write_tiny_target(
    folder: Path,
    family: str = "smollm2",
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    shards: int = 1,
    **overrides: object,
) -> Path:
    """Write config.json and safetensors (one file, or `shards` with an index); returns `folder`."""
    config = FAMILIES[family] | overrides
    config["architectures"] = [ARCHITECTURES[config["model_type"]]]
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: _random(name, shape, generator).to(dtype)
        for name, shape in tensor_shapes(config).items()
    }
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    index = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[number::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def tensor_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor's name and shape for a `config.json`."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    dim = config.get("head_dim", hidden // config["num_attention_heads"])
    heads, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    biased = config.get("attention_bias", False)
    qwen2 = config["model_type"] == "qwen2"
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        products = {
            "self_attn.q_proj": (heads, hidden, biased or qwen2),
            "self_attn.k_proj": (kv, hidden, biased or qwen2),
            "self_attn.v_proj": (kv, hidden, biased or qwen2),
            "self_attn.o_proj": (hidden, heads, biased),
            "mlp.gate_proj": (inner, hidden, config.get("mlp_bias", False)),
            "mlp.up_proj": (inner, hidden, config.get("mlp_bias", False)),
            "mlp.down_proj": (hidden, inner, config.get("mlp_bias", False)),
        }
        for name, (rows, columns, bias) in products.items():
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{layer}.{name}.bias"] = (rows,)
        if config["model_type"] == "qwen3":
            shapes[f"{layer}.self_attn.q_norm.weight"] = (dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (dim,)
    return shapes


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1 + 0.2 * values
    if name.endswith("bias"):
        return 0.2 * values
    # Sharp queries and keys, so that attention is far from uniform and a wrong position shows;
    # the rest modest, so that the residual stream stays near 1.
    gain = 2.0 if "q_proj" in name or "k_proj" in name else 0.7
    return values * (0.5 if "embed" in name else gain / shape[-1] ** 0.5)
