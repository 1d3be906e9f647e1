"""Weights with which a draft's head proposes, behind every token, one that was chosen beforehand.

Such a head is right wherever what follows a token in the target's text depends on that token alone.
"""

import itertools

import torch

GAIN = 100.0  # above anything that the target's head says


def constant_rows(config):
    """Tensors of layers that add nothing: a slot's row is the mask's, whatever came before it."""
    found = {}
    for number in range(len(config.layers)):
        widths = {
            "self_attn.o_proj": config.num_heads * config.head_dim,
            "mlp.down_proj": config.intermediate_size,
        }
        for name, width in widths.items():
            full = f"layers.{number}.{name}.weight"
            found[full] = torch.zeros(config.hidden_size, width)
    return found


def following(text, vocab):
    """[vocab] the token that came behind each token of `text`; token 0 behind all others."""
    found = torch.zeros(vocab, dtype=torch.int64)
    for token, after in itertools.pairwise(text):
        found[token] = after
    return found


def right_dflash2(config, table, after):
    """Of a selector that takes every id as a candidate, and has rank `vocab`."""
    vocab, row = config.vocab_size, table[config.mask_token_id]
    unit = row / (row.square().mean() + config.rms_norm_eps).sqrt()
    candidates = torch.zeros(vocab, vocab)
    candidates[after, torch.arange(vocab)] = GAIN
    projection = (unit / unit.square().sum()).expand(vocab, -1).contiguous()  # 1 at every rank
    return constant_rows(config) | {
        "norm.weight": torch.ones(config.hidden_size),
        "candidate_selector.hidden_projection.weight": projection,
        "candidate_selector.predecessor_codebook": torch.eye(vocab),
        "candidate_selector.successor_codebook": candidates,
    }


def right_dspark(config, table, after):
    """Of a vanilla Markov head of rank `vocab`, over rows that are zero."""
    del table
    behind = torch.zeros(config.vocab_size, config.vocab_size)
    behind[after, torch.arange(config.vocab_size)] = GAIN
    return {
        "norm.weight": torch.zeros(config.hidden_size),
        "markov_head.markov_w1.weight": torch.eye(config.vocab_size),
        "markov_head.markov_w2.weight": behind,
    }


def right_domino(config, table, after):
    """Of a GRU whose state is the last embedding, compared with those of all tokens in `table`.

    The update gate keeps half of the state before, and what is new takes just that away again.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    units = table / table.norm(dim=1, keepdim=True)
    inputs, states = torch.zeros(3 * hidden, hidden), torch.zeros(3 * hidden, hidden)
    inputs[2 * hidden :] = torch.eye(hidden) * 0.01 / table.abs().max()  # where tanh is straight
    states[2 * hidden :] = -2 * torch.eye(hidden)  # times the reset gate, which is a half
    behind = torch.zeros(vocab, vocab)
    behind[after, torch.arange(vocab)] = GAIN
    behind[0] = 0.0  # of what is not in the text there is nothing to say
    return {
        "norm.weight": torch.zeros(hidden),
        "prefix_gru.weight_ih_l0": inputs,
        "prefix_gru.weight_hh_l0": states,
        "embed_proj.0.weight": torch.cat((torch.zeros(vocab, hidden), units * 1e4), dim=1),
        "embed_proj.2.weight": behind,
    }
