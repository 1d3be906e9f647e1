"""Llama 2 and 3.x, and what is built like them (SmolLM2, TinyLlama, Vicuna)."""

from typing import Final

from target_daemon.dense.layout import Rules
from target_daemon.dense.model import DenseFamily

FAMILY: Final = DenseFamily(
    ("llama",),
    Rules(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=False,
        window="none",
        absent_theta=10000.0,  # Llama 2's configs were published without the key
    ),
)
