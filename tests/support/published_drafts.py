"""config.json files with the keys and values of drafts as they are published, by their shape."""

QWEN3_8B = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN36_27B = {
    **{key: value for key, value in QWEN3_8B.items() if key not in ("rope_theta", "rope_scaling")},
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "max_position_embeddings": 262144,
    "num_target_layers": 64,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    "sliding_window": 2048,
    "use_sliding_window": True,
    "vocab_size": 248320,
}
TAPS = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
PUBLISHED = {
    "z-lab, old places": {
        **QWEN3_8B,
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 16,
        "num_target_layers": 36,
        "dflash_config": TAPS,
    },
    "z-lab, new places": {
        **QWEN36_27B,
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {
            "block_size": 16,
            "mask_token_id": 248070,
            "mask_token": "<|MASK|>",
            "target_layer_ids": [1, 16, 31, 46, 61],
        },
    },
    "z-lab, DFlash2": {
        **QWEN36_27B,
        "architectures": ["DFlash2DraftModel"],
        "is_causal": False,
        "layer_types": ["sliding_attention"] * 5,
        "dflash_config": {
            "block_size": 8,
            "conv_group_size": 16,
            "conv_kernel_size": 2,
            "mask_token_id": 248070,
            "selector_rank": 256,
            "selector_top_k": 16,
            "target_layer_ids": [5, 19, 33, 47, 61],
        },
    },
    "speculators": {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.5.0",
        "transformer_layer_config": QWEN3_8B,
        "draft_vocab_size": 32000,
        "target_hidden_size": 4096,
        "block_size": 8,
        "mask_token_id": 151669,
        "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 7,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": "some/target", "architectures": ["Qwen3ForCausalLM"]},
        },
    },
}
# network, taps, block, proposals, first slot, rotary base
EXPECTED = {
    "z-lab, old places": ("dflash", (1, 9, 17, 25, 33), 16, 15, 1, 1e6),
    "z-lab, new places": ("dflash", (1, 16, 31, 46, 61), 16, 15, 1, 1e7),
    "z-lab, DFlash2": ("dflash2", (5, 19, 33, 47, 61), 8, 7, 1, 1e7),
    "speculators": ("dflash", (1, 9, 17, 25, 33), 8, 7, 1, 1e6),
}
