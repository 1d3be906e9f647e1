"""Tiny checkpoints of every family that keeps more than rows, or runs experts, and their state."""

import torch
from support import foreign_target
from support.foreign_target import ATTENTION, COMMON
from support.plain_host import PlainHost
from support.targets import features

from protocol.checkpoints.target_config import read_model_config
from protocol.checkpoints.tensors import open_tensors
from protocol.choice import choose
from protocol.config import TargetConfig
from target_daemon.families.base import LoadRequest
from target_daemon.families.transformers_model import TransformersTarget

WINDOW = 9
TINY = COMMON | ATTENTION | {"num_hidden_layers": 2, "max_position_embeddings": 512}
TINY = TINY | {"eos_token_id": None, "tie_word_embeddings": False}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = {
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}
WINDOWED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
# Name -> settings of the config.
FAMILIES = {
    "qwen3_5": TINY | DELTA | {"model_type": "qwen3_5_text"},
    "qwen3_next": TINY
    | DELTA
    | EXPERTS
    | {"model_type": "qwen3_next", "shared_expert_intermediate_size": 16},
    "falcon_h1": TINY | MAMBA | {"model_type": "falcon_h1", "mamba_d_ssm": 32, "mamba_n_heads": 4},
    "bamba": TINY | MAMBA | {"model_type": "bamba", "mamba_n_heads": 8, "attn_layer_indices": [1]},
    "lfm2": TINY | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
    "gemma3": TINY | WINDOWED | {"model_type": "gemma3_text", "query_pre_attn_scalar": 8},
    "qwen3_moe": TINY | EXPERTS | {"model_type": "qwen3_moe"},
    "gpt_oss": TINY
    | WINDOWED
    | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2},
}


NATIVE = "-native"  # behind a family's name: loaded by ours


def load_adapted(folder, host=None, **settings):
    """The checkpoint through `transformers`, also where a family of ours would load it."""
    config = TargetConfig(model=str(folder), run_dir="", life=1, dtype="float32", **settings)
    model = read_model_config(folder)
    with open_tensors(folder) as tensors:
        request = LoadRequest(model, tensors, torch.float32, config, host or PlainHost())
        return TransformersTarget(request)


def own_text(folder, prompt, count, sampling):
    """What the library's model generates by itself, each token chosen by our one choice."""
    import transformers

    class Chosen(transformers.LogitsProcessor):
        def __call__(self, input_ids, scores):
            history = input_ids[0]
            token = choose(scores.float(), len(history), sampling, history)
            return torch.full_like(scores, -torch.inf).index_fill_(1, token.long(), 0.0)

    return foreign_target.own_text(folder, prompt, count, Chosen())


def adapted_state(target, slot):
    """Everything that a slot of the adapter holds for the next row, without what is kept beside."""
    found = {}
    for index, layer in enumerate(target.caches._caches[slot].layers):
        rows = getattr(layer, "sliding_window", 0) - 1
        for name in ("keys", "values"):
            tensor = getattr(layer, name, None)
            if tensor is not None:
                found[f"{index}.{name}"] = tensor[:, :, -rows:] if rows > 0 else tensor
        for name in ("conv_states", "recurrent_states"):
            for key, tensor in getattr(layer, name, {}).items():
                if tensor is not None:
                    last = layer.conv_kernel_size[key] if name == "conv_states" else 0
                    found[f"{index}.{name}.{key}"] = tensor[..., -last:]
    return found


def native_state(target, slot):
    """The same of a native hybrid: rows of K/V by position, and what the recurrent layers hold."""
    length = target.states.slots[slot].length
    found = {str(at): each for at, each in enumerate(target.states.copies(slot))}
    return found | {"key_values": target.key_values.save(slot, 0, length)}


def same_as_fresh(target, state, text, near):
    """Hold slot 0, which has run `text`, to slot 1, which runs it as one prompt now."""
    target.reset(1)
    target.verify_batch(1, torch.tensor(text), 0, "none")
    found, fresh = state(target, 0), state(target, 1)
    assert found.keys() == fresh.keys()
    for name, tensor in found.items():
        assert torch.allclose(tensor, fresh[name], **near), name
    start = max(0, len(text) - target.ring.shape.window)
    rows = (features(target, slot, start, len(text)) for slot in (0, 1))
    torch.testing.assert_close(*rows, **near)
