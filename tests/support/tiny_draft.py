"""Random tiny drafts in both published dialects, written as real checkpoint folders."""

import json

import numpy as np
import torch
from safetensors.torch import save_file

from draft_daemon.models.base import DraftNetwork
from protocol import plugins
from protocol.checkpoints.draft_config import read_draft_config
from protocol.transports.base import WeightSpec

Z_LAB = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 6,
    "num_target_layers": 6,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2, 5]},
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "vocab_size": 96,
    "rope_theta": 50000.0,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
}
SPECULATORS = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "speculators_version": "0.4.0",
    "transformer_layer_config": {
        key: value
        for key, value in Z_LAB.items()
        if key not in ("architectures", "auto_map", "block_size", "num_target_layers")
        and key != "dflash_config"
    },
    "block_size": 6,
    "mask_token_id": 3,
    "aux_hidden_state_layer_ids": [1, 3, 6],
    "draft_vocab_size": 96,
    "target_hidden_size": 32,
    "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "some/target"}},
}


DFLASH2 = {
    **{key: value for key, value in Z_LAB.items() if key != "block_size"},
    "architectures": ["DFlash2DraftModel"],
    "is_causal": False,
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 8,
    "use_sliding_window": True,
    "dflash_config": {
        **Z_LAB["dflash_config"],
        "block_size": 6,
        "conv_kernel_size": 2,
        "conv_group_size": 4,
        "selector_rank": 8,
        "selector_top_k": 5,
    },
}


DSPARK = {
    **Z_LAB,
    "architectures": ["DSparkDraftModel"],
    "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
    "dflash_config": {
        **Z_LAB["dflash_config"],
        "projector_type": "dspark",
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "confidence_head_alpha": 1.0,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
}
DOMINO = {
    **Z_LAB,
    "dflash_config": {
        **Z_LAB["dflash_config"],
        "projector_type": "domino",
        "pure_draft_prefix_len": 1,
        "emb_dim": 12,
        "gru_hidden_dim": 16,
        "shift_label": True,
    },
}
HEADS = {
    "dflash2": DFLASH2,
    "domino": DOMINO,
    "dspark": DSPARK,
}  # networks with a head of their own


def merged(base, **changes):
    """`base` with keys replaced; a dictionary is merged, None removes the key."""
    result = json.loads(json.dumps(base))
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], **value)
        else:
            result[key] = value
    return result


def uniform(shape, seed):
    """Numbers in -1..1 that are the same for every version of torch and NumPy."""
    raw = np.random.Generator(np.random.PCG64(seed)).random(shape)
    return torch.from_numpy(2 * raw - 1).to(torch.float32)


def random_tensors(config, seed=0, dtype=torch.float32):
    """Every tensor that the network of `config` needs; norms near one, products tame."""
    network = plugins.load("draft_daemon.models", config.network, "NETWORK", DraftNetwork)
    tensors = {}
    for number, (name, shape) in enumerate(sorted(network.shapes(config).items())):
        value = uniform(shape, 1000 * seed + number)
        if len(shape) == 1:
            value = 1 + 0.4 * value if "norm" in name else 0.4 * value
        else:
            value = 2 * value / shape[-1] ** 0.5
        tensors[name] = value.to(dtype)
    return tensors


def write_draft(folder, raw=Z_LAB, *, seed=0, dtype=torch.float32, extra=None, without=()):
    """Write config.json and model.safetensors; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = random_tensors(read_draft_config(folder), seed, dtype) | (extra or {})
    kept = {name: value for name, value in tensors.items() if name not in without}
    save_file(kept, folder / "model.safetensors")
    return folder


def embedding(config):
    return uniform((config.vocab_size, config.hidden_size), 501)


def head(config):
    return uniform((config.vocab_size, config.hidden_size), 502)


def shared_weights(host, config, *, layout="head_t", dtype="float32"):
    """Create and fill what a target shares; `layout`: head_t, head, or tied (no head)."""
    vocab, hidden = config.vocab_size, config.hidden_size
    shapes = {"embed": (vocab, hidden), "head": (vocab, hidden), "head_t": (hidden, vocab)}
    kept = ("embed",) if layout == "tied" else ("embed", layout)
    made = host.create_weights({name: WeightSpec(shapes[name], dtype) for name in kept})
    made["embed"].copy_(embedding(config))
    if layout != "tied":
        made[layout].copy_(head(config) if layout == "head" else head(config).t())


class Features:
    """One sequence's feature rows, written into a ring as forwards of a target would."""

    def __init__(self, ring, *, slot=0, sequence=1):
        self.ring, self.slot, self.sequence = ring, slot, sequence
        self.rows = uniform((400, ring.shape.row_width), 900 + sequence)
        ring.claim(slot, sequence)

    def write(self, start, stop):
        self.ring.announce(self.slot, stop)
        for position in range(start, stop):
            row = position % self.ring.shape.capacity
            self.ring.rows[self.slot, row] = self.rows[position].to(self.ring.rows.dtype)
