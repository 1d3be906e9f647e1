"""Random tiny checkpoints of families that only `transformers` knows, and its own answers."""

import json
import warnings

import torch

COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "vocab_size": 97,
    "bos_token_id": 1,
    "eos_token_id": 96,
    "pad_token_id": 0,
}
ATTENTION = {
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
# Name -> settings of the config. Learned positions, parallel blocks, windows with soft-caps and a
# scaled embedding, a recurrent model, and two hybrids: with convolutions and with linear attention.
FAMILIES = {
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 256,
        "vocab_size": 97,
        "bos_token_id": 1,
        "eos_token_id": 96,
    },
    "gpt_neox": COMMON
    | {
        "model_type": "gpt_neox",
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    },
    "gemma2": COMMON
    | ATTENTION
    | {"model_type": "gemma2", "sliding_window": 9, "query_pre_attn_scalar": 8},
    "mamba": COMMON | {"model_type": "mamba", "state_size": 4, "intermediate_size": 64},
    "lfm2": COMMON
    | ATTENTION
    | {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv", "conv"]},
    "mamba2": COMMON
    | {
        "model_type": "mamba2",
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 4,
        "n_groups": 1,
        "time_step_limit": (0.0, float("inf")),
    },
    "qwen3_next": COMMON
    | ATTENTION
    | {
        "model_type": "qwen3_next",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "tie_word_embeddings": False,
    },
}


def write_foreign_target(folder, family, *, seed=0, dtype=torch.float32, gain=1.5, **changes):
    """Have `transformers` make and save a random model of `family`; returns `folder`.

    `family` is a name in `FAMILIES`, or a config's settings; `gain` is how strongly layers act.
    """
    import transformers

    settings = (FAMILIES[family] if isinstance(family, str) else family) | changes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.AutoConfig.for_model(**settings)
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            # As it is made, a model's layers hardly change what they are given.
            if parameter.dim() == 2 and "A_log" not in name:
                parameter.data.normal_(0, gain * parameter.shape[1] ** -0.5, generator=generator)
        model.to(dtype).save_pretrained(folder)
    # What an old checkpoint would not have, and a reader of config.json could miss.
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


def edit_config(folder, **changes):
    """Change keys of config.json; None removes one."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def own_answers(folder, ids, taps, dtype=torch.float32):
    """Logits [n, vocab] and feature rows by `transformers`, without a cache or a hook."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        answer = model(input_ids=ids[None], use_cache=False, output_hidden_states=True)
    # Entry 0 is the embedding's, but Mamba leaves it out.
    first = 0 if model.config.model_type == "mamba" else 1
    if not taps:
        return answer.logits[0].float(), None
    rows = torch.cat([answer.hidden_states[tap + first][0] for tap in taps], dim=-1)
    return answer.logits[0].float(), rows


def own_text(folder, prompt, count, *processors):
    """The text by `transformers`' own generation: greedy over what `processors` make of scores."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    made = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        logits_processor=transformers.LogitsProcessorList(processors),
    )
    return made[0, len(prompt) :].tolist()
