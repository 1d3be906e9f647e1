"""Where a draft begins: its config.json, and layers that are the target's own first and last ones.

A target's layers know its embedding and its features already; from random weights the same loss
takes several times as many steps. What the target has no counterpart of is neutral: norms are ones,
and `fc` passes on the last tap alone. Of a target that is no dense decoder of ours all is neutral.
"""

from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from draft_daemon.models.dflash import DFlash
from draft_daemon.training.batches import Lexicon
from protocol.checkpoints.draft_config import TargetFacts, canonical, check_pair, read_draft_config
from protocol.checkpoints.draft_facts import DraftCheckpointConfig
from protocol.checkpoints.target_config import ModelConfig, read_model_config
from protocol.checkpoints.tensors import open_draft, open_tensors
from protocol.errors import ConfigError
from protocol.lent_weights import find_ends
from protocol.training import TrainConfig

STDDEV: Final = 0.02  # of weights that nothing is known of
HEAD_DIM: Final = 64  # of a target that states no head
THETA: Final = 10000.0  # of a target that states none
# What a draft to begin with must have in common with the one that is made.
SHAPE: Final = (
    *("network", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"),
    *("attention_bias", "layers", "rope_theta", "rope_scaling", "vocab_size", "draft_vocab_size"),
    *("mask_token_id", "target_layer_ids", "sample_from_anchor"),
)


def draft_json(config: TrainConfig) -> dict[str, Any]:
    """The published ``config.json``: the target's shape, full attention, and DFlash's own keys."""
    model = read_model_config(Path(config.model))
    dim = model.head_dim or HEAD_DIM
    heads = model.num_heads or max(1, model.hidden_size // dim)
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": config.block_size,
        "num_target_layers": model.num_layers,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.taps),
        },
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size or 8 * model.hidden_size // 3,
        "num_hidden_layers": config.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": model.num_kv_heads or heads,
        "head_dim": dim,
        "rms_norm_eps": model.rms_norm_eps or 1e-6,
        "vocab_size": model.vocab_size,
        "rope_theta": model.rope_theta or THETA,
        **({"rope_scaling": model.rope_scaling} if model.rope_scaling else {}),
        "max_position_embeddings": model.max_positions,
        "layer_types": ["full_attention"] * config.layers,
        "attention_bias": _biased(Path(config.model), model),
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def read_facts(config: TrainConfig, raw: dict[str, Any]) -> DraftCheckpointConfig:
    """`raw` as every reader of the checkpoint will understand it; DraftMismatch for wrong taps."""
    model = read_model_config(Path(config.model))
    facts = canonical(raw, "the draft's config.json")
    check_pair(facts, TargetFacts(model.hidden_size, model.num_layers, model.vocab_size))
    return facts


def read_lexicon(
    config: TrainConfig, facts: DraftCheckpointConfig, device: torch.device, dtype: torch.dtype
) -> Lexicon:
    """The target's embedding and head, from its checkpoint."""
    model = read_model_config(Path(config.model))
    with open_tensors(Path(config.model)) as source:
        names = find_ends(source, model)
        embed, head = (source.get(name)[: facts.vocab_size] for name in names)
    return Lexicon(embed.to(device), head.to(device, dtype), facts.mask_token_id, facts.block_size)


def first_weights(config: TrainConfig, facts: DraftCheckpointConfig) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, in float32: another draft's, or as the target has them."""
    return _of_draft(Path(config.start), facts) if config.start else _of_target(config, facts)


def _of_draft(path: Path, facts: DraftCheckpointConfig) -> dict[str, Tensor]:
    """The weights of a draft of the same shape; ConfigError where it is another one."""
    theirs = read_draft_config(path)
    for name in SHAPE:
        ours, found = getattr(facts, name), getattr(theirs, name)
        if ours != found:
            raise ConfigError(f"{path} cannot be begun with: its {name} is {found}, wanted {ours}")
    with open_draft(path) as source:
        shapes = DFlash.shapes(facts).items()
        return {name: source.expect(name, shape).float().clone() for name, shape in shapes}


def _of_target(config: TrainConfig, facts: DraftCheckpointConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(config.seed)
    model = read_model_config(Path(config.model))
    origins = _origins(config.layers, model.num_layers)
    found = {}
    with open_tensors(Path(config.model)) as source:
        # Elsewhere the same name may mean something else: norms of hybrids and Gemmas add 1.
        there = source.names() if model.dense else frozenset[str]()
        for name, shape in DFlash.shapes(facts).items():
            origin = _origin(name, origins)
            if origin in there and source.shape(origin) == shape:
                found[name] = source.get(origin).float().clone()
            else:
                found[name] = _neutral(name, shape, facts, generator)
    return found


def _origins(layers: int, target_layers: int) -> list[int]:
    """The target's first layer, then its last ones: 0, 28, 29 for 3 of 30."""
    last = [max(0, target_layers - layers + index) for index in range(1, layers)]
    return [0, *last]


def _origin(name: str, origins: list[int]) -> str:
    """What the target calls the tensor that `name` starts from; empty: nothing."""
    if name == "norm.weight":
        return "model.norm.weight"
    if name == "hidden_norm.weight":
        return f"model.layers.{origins[-1]}.input_layernorm.weight"
    parts = name.split(".")
    if parts[0] != "layers":
        return ""
    return ".".join(("model.layers", str(origins[int(parts[1])]), *parts[2:]))


def _neutral(
    name: str, shape: tuple[int, ...], facts: DraftCheckpointConfig, generator: torch.Generator
) -> Tensor:
    if name == "fc.weight":
        weight = STDDEV * torch.randn(shape, generator=generator)
        weight[:, -facts.hidden_size :] += torch.eye(facts.hidden_size)
        return weight
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if len(shape) == 1:
        return torch.zeros(shape)
    return STDDEV * torch.randn(shape, generator=generator)


def _biased(path: Path, model: ModelConfig) -> bool:
    """Whether the target's attention has biases, whatever its family calls the key."""
    if model.attention_bias:
        return True
    with open_tensors(path) as source:
        return "model.layers.0.self_attn.q_proj.bias" in source.names()
