"""The choice function as `docs/sampling.md` defines it: slowly, one id at a time.

Logits are float32, as there; what follows the adjustments is float64.
"""

import math

import numpy as np

WORD = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


def mix(z):
    z &= WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def noise(seed, position, token):
    key = mix(mix(seed + GAMMA) + (position + 1) * GAMMA)
    bits = mix(key + (token + 1) * GAMMA)
    return -math.log(-math.log(((bits >> 12) + 0.5) / 2**52))


def adjusted(logits, position, s, history):
    x = [np.float32(value) for value in logits]
    for token, bias in s.logit_bias:
        x[token] += np.float32(bias)
    output = list(history[s.prompt_tokens :])
    for token in s.eos_token_ids:
        if s.ignore_eos or position - s.prompt_tokens < s.min_tokens:
            x[token] = np.float32(-math.inf)
    for token in s.stop_token_ids:
        if position - s.prompt_tokens < s.min_tokens:
            x[token] = np.float32(-math.inf)
    penalty = np.float32(s.repetition_penalty)
    for token in set(history):
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token in set(output):
        x[token] -= np.float32(s.frequency_penalty) * np.float32(output.count(token))
        x[token] -= np.float32(s.presence_penalty)
    return [float(value) for value in x]


def distribution(x, s):
    """Probabilities after temperature and filters, by id."""
    best = max(x)
    weight = [math.exp((value - best) / s.temperature) for value in x]
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    order = order[: s.top_k or None]
    total, before, kept = sum(weight[i] for i in order), 0.0, []
    for i in order:
        if kept and before >= s.top_p * total and s.top_p < 1:
            break
        kept.append(i)
        before += weight[i]
    kept = [i for i in kept if weight[i] >= s.min_p]
    total = sum(weight[i] for i in kept)
    return {i: weight[i] / total for i in kept}


def choose_one(logits, position, s, history):
    x = adjusted(logits, position, s, history)
    if s.temperature < 1e-5:
        return x.index(max(x))
    kept = sorted(distribution(x, s))
    best = max(x)
    return max(kept, key=lambda i: ((x[i] - best) / s.temperature + noise(s.seed, position, i), -i))
