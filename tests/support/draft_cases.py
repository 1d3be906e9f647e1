"""Draft configs whose hidden states are compared with the reference package's, and the rounds.

`tests/reference/hidden_states.py` reads the same inputs from files: it runs in an environment that
does not have this project.
"""

import torch
from support.tiny_draft import DFLASH2, Z_LAB, embedding, head, merged, uniform

from draft_daemon.context import DraftContext
from draft_daemon.head import Borrowed
from draft_daemon.walker import Noise, Walker
from protocol.messages import Sampling

SLIDING = {"sliding_window": 8, "use_sliding_window": True}
CASES = {
    "full": Z_LAB,
    "sliding": merged(Z_LAB, layer_types=["sliding_attention", "full_attention"], **SLIDING),
    "sliding_bidirectional": merged(
        Z_LAB, layer_types=["full_attention", "sliding_attention"], is_causal=False, **SLIDING
    ),
    "causal": merged(Z_LAB, layer_types=["full_attention"] * 2, is_causal=True),
    "biased": merged(Z_LAB, attention_bias=True, rms_norm_eps=1e-3),
    "llama3_rope": merged(
        Z_LAB,
        rope_theta=None,
        rope_parameters={
            "rope_theta": 5000.0,
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "one_layer": merged(
        Z_LAB, num_hidden_layers=1, num_key_value_heads=4, dflash_config={"target_layer_ids": [3]}
    ),
    "dflash2": DFLASH2,
    "dflash2_capped": merged(
        DFLASH2,
        layer_types=["full_attention", "sliding_attention"],
        dflash_config={
            "conv_kernel_size": 3,
            "conv_group_size": 16,
            "selector_top_k": 16,
            "output_multiplier": 0.75,
            "final_logit_softcapping": 4.0,
        },
    ),
}
# Of these, what the selector makes of a head is compared as well.
SELECTING = tuple(name for name in CASES if name.startswith("dflash2"))
# New context rows, then rows of the block: a long prompt first, as in generation.
ROUNDS = ((21, 6), (1, 6), (3, 6), (6, 4), (2, 2))
TOTAL = sum(new for new, _ in ROUNDS)


def inputs(config):
    """Feature rows [TOTAL, taps * hidden], and one block's embedding rows per round."""
    features = uniform((TOTAL, config.feature_width), 77)
    blocks = [uniform((width, config.hidden_size), 80 + i) for i, (_, width) in enumerate(ROUNDS)]
    return features, blocks


def anchors():
    """The pending token of each round."""
    return [7 + 11 * number for number in range(len(ROUNDS))]


@torch.inference_mode()
def selected(draft, hidden):
    """The tokens that our walk chooses in each round, from `hidden` as `hidden_states` gives it."""
    weights = {"embed": embedding(draft.config), "head": head(draft.config)}
    walker = Walker(draft, Borrowed(draft, weights, draft.config.vocab_size), 96)
    noise = Noise(0, Sampling())
    walks = [
        walker.walk(rows[1:], anchor, noise) for rows, anchor in zip(hidden, anchors(), strict=True)
    ]
    return [walk.ids[:, 0] for walk in walks]


@torch.inference_mode()
def hidden_states(draft, *, window=64, piece=64, skip=()):
    """Our hidden rows [width, hidden] of each round, context kept incrementally.

    `piece`: context rows per projection; `skip`: positions that never become context.
    """
    features, blocks = inputs(draft.config)
    context = DraftContext(draft.config, 2, window, draft.network.dtype)
    base, found = 0, []
    for (new, width), block in zip(ROUNDS, blocks, strict=True):
        for start in range(base, base + new, piece):
            kept = [at for at in range(start, min(start + piece, base + new)) if at not in skip]
            for at in kept if skip else kept[:1]:
                stop = at + 1 if skip else kept[-1] + 1
                rows = draft.network.project_context(features[at:stop], at)
                context.write(1, at, *rows)
        base += new
        view = context.view(1, base, width, window)
        found.append(draft.network.block(block.to(draft.network.dtype), view))
    return found
