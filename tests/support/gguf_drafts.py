"""GGUF files of tiny drafts, as the two producers write them, from the tensors of a folder."""

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import load_file

from protocol.checkpoints.draft_config import read_draft_config

LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
LLAMA_CPP = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "candidate_selector.predecessor_codebook": "selector_prev.weight",
    "candidate_selector.successor_codebook": "selector_next.weight",
}
LUCEBOX = {
    "fc.weight": "dflash.fc.weight",
    "hidden_norm.weight": "dflash.hidden_norm.weight",
    "norm.weight": "output_norm.weight",
    "markov_head.markov_w1.weight": "dflash.dspark.markov.w1",
    "markov_head.markov_w2.weight": "dflash.dspark.markov.w2",
    "confidence_head.proj.weight": "dflash.dspark.confidence.weight",
    "confidence_head.proj.bias": "dflash.dspark.confidence.bias",
}


def write_llama_cpp(folder, path, *, extra=None, kind=None, tensors=None, without=()):
    """As llama.cpp's converter: ``dflash``, layer inputs, ids in place of offsets."""
    config, arch = read_draft_config(folder), "dflash"
    facts = _shared(config, arch) | {
        "dflash.block_size": config.block_size,
        "dflash.target_layers": [one + 1 for one in config.target_layer_ids],
        "tokenizer.ggml.mask_token_id": config.mask_token_id,
        "tokenizer.ggml.tokens": [f"t{one}" for one in range(config.vocab_size)],
    }
    facts |= {f"dflash.{key}": config.options[key] for key in config.options if key in DFLASH2}
    windows = [rule.window for rule in config.layers]
    if any(windows):
        facts["dflash.attention.sliding_window"] = max(windows)
        facts["dflash.attention.sliding_window_pattern"] = [bool(one) for one in windows]
    found = _tensors(folder)
    found.pop("t2d", None)
    if "d2t" in found:
        found["d2t"] = found["d2t"] + np.arange(found["d2t"].size)
    named = {_name(name, LLAMA_CPP): value for name, value in found.items()}
    return _write(path, arch, facts | (extra or {}), named | (tensors or {}), kind, without)


DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def write_lucebox(folder, path, *, arch="dflash-draft", extra=None, tensors=None, without=()):
    """As lucebox's converter: DFlash's keys one level deeper, layer outputs."""
    config = read_draft_config(folder)
    facts = _shared(config, arch) | {
        f"{arch}.vocab_size": config.vocab_size,
        f"{arch}.dflash.block_size": config.block_size,
        f"{arch}.dflash.mask_token_id": config.mask_token_id,
        f"{arch}.dflash.n_target_layers": len(config.target_layer_ids),
        f"{arch}.dflash.target_layer_ids": list(config.target_layer_ids),
        f"{arch}.attention.sliding_window": max(rule.window for rule in config.layers) or 2048,
        f"{arch}.attention.sliding_window_pattern": [bool(rule.window) for rule in config.layers],
    }
    if "markov_rank" in config.options:
        own = f"{arch}.dflash.dspark"
        width = config.hidden_size + config.options["markov_rank"]
        facts |= {f"{own}.enabled": 1, f"{own}.markov_rank": config.options["markov_rank"]}
        facts |= {f"{own}.confidence.enabled": 1, f"{own}.confidence_dim": width}
    found = _tensors(folder)
    named = {_name(name, LUCEBOX): value for name, value in found.items()}
    return _write(path, arch, facts | (extra or {}), named | (tensors or {}), None, without)


def _tensors(folder):
    """As NumPy has them: floats in fp32, since it knows no bf16."""
    return {
        name: (value.float() if value.is_floating_point() else value).numpy()
        for name, value in load_file(folder / "model.safetensors").items()
    }


def _shared(config, arch):
    return {
        f"{arch}.context_length": config.max_positions,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.block_count": len(config.layers),
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_heads,
        f"{arch}.attention.head_count_kv": config.num_kv_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": config.rope_theta,
    }


def _name(name, top):
    if name in top or not name.startswith("layers."):
        return top.get(name, name)
    _, number, rest = name.split(".", 2)
    return f"blk.{number}.{LAYER[rest]}"


def _write(path, arch, facts, tensors, kind, without):
    writer = GGUFWriter(path, arch)
    adders = {
        str: writer.add_string,
        float: writer.add_float32,
        int: writer.add_uint32,
        bool: writer.add_bool,
        list: writer.add_array,
    }
    for key, value in facts.items():
        if key not in without and value is not None:
            adders[type(value)](key, value)
    for name, value in tensors.items():
        if name in without:
            continue
        if kind is not None and value.ndim == 2 and value.shape[-1] % 32 == 0:
            writer.add_tensor(name, quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


Q8 = GGMLQuantizationType.Q8_0
