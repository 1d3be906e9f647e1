"""From `config.json` to the layout of a dense decoder: the facts in which families differ."""

from dataclasses import dataclass
from typing import Literal

from protocol.checkpoints.target_config import ModelConfig
from protocol.errors import CheckpointError, UnsupportedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How a dense family reads its config."""

    qkv_bias: Literal["always", "never", "attention_bias"]
    output_bias: Literal["never", "attention_bias"]
    qk_norm: bool
    # "stated": the key `sliding_window` alone windows every layer; "switched": it does so where
    # `use_sliding_window` says, from `max_window_layers` on or as `layer_types` lists.
    window: Literal["none", "stated", "switched"]
    absent_theta: float | None = None  # what an absent `rope_theta` means; None: it must be there
    absent_window: int | None = None  # what an absent `sliding_window` means


@dataclass(frozen=True, slots=True)
class Layout:
    """What the layers of one checkpoint look like."""

    theta: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # per layer; a window counts the current token


def resolve(model: ModelConfig, rules: Rules) -> Layout:
    """Apply a family's rules; CheckpointError for a missing key, UnsupportedModel for a refusal."""
    theta = model.rope_theta if model.rope_theta is not None else rules.absent_theta
    if theta is None:
        raise CheckpointError(
            f"config.json: a {model.model_type} model must state `rope_theta`; it is missing"
        )
    by_key = {"always": True, "never": False, "attention_bias": model.attention_bias}
    known = "attention_bias" in (rules.qkv_bias, rules.output_bias)
    if model.attention_bias and not known:
        raise UnsupportedModel(f"`attention_bias` is true, which {model.model_type} does not have")
    return Layout(
        theta=theta,
        qkv_bias=by_key[rules.qkv_bias],
        output_bias=by_key[rules.output_bias],
        mlp_bias=model.mlp_bias,
        qk_norm=rules.qk_norm,
        windows=_windows(model, rules),
    )


def _windows(model: ModelConfig, rules: Rules) -> tuple[int | None, ...]:
    full = (None,) * model.num_layers
    if rules.window == "stated":
        if "sliding_attention" in model.layer_types and "full_attention" in model.layer_types:
            raise UnsupportedModel(f"`layer_types` vary, which {model.model_type} does not have")
        stated = model.sliding_window
        if not model.states_sliding_window:
            stated = rules.absent_window
        return (stated,) * model.num_layers
    if rules.window == "switched":
        return _switched(model)
    if model.sliding_window is not None or "sliding_attention" in model.layer_types:
        raise UnsupportedModel(
            f"`sliding_window` is {model.sliding_window}, which {model.model_type} does not have"
        )
    return full


def _switched(model: ModelConfig) -> tuple[int | None, ...]:
    window = model.sliding_window if model.use_sliding_window else None
    types = model.layer_types
    if not types:
        first = model.num_layers if model.max_window_layers is None else model.max_window_layers
        if window is not None and model.max_window_layers is None:
            raise CheckpointError(
                "config.json: `use_sliding_window` without `max_window_layers` or `layer_types`"
            )
        return tuple(window if i >= first else None for i in range(model.num_layers))
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModel(f"`layer_types` has {unknown[0]!r}, which is not supported")
    if "sliding_attention" in types and window is None:
        raise UnsupportedModel(
            "`layer_types` lists sliding layers, but `use_sliding_window` or `sliding_window` "
            "is not set"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)
