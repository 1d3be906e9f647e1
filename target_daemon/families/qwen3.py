"""Qwen3, dense: RMSNorm on every head of query and key."""

from typing import Final

from target_daemon.dense.layout import Rules
from target_daemon.dense.model import DenseFamily

FAMILY: Final = DenseFamily(
    ("qwen3",),
    Rules(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        window="switched",
    ),
)
