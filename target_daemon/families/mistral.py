"""Mistral 7B and what is built like it; version 0.1 has a sliding window in every layer."""

from typing import Final

from target_daemon.dense.layout import Rules
from target_daemon.dense.model import DenseFamily

FAMILY: Final = DenseFamily(
    ("mistral",),
    Rules(
        qkv_bias="never",
        output_bias="never",
        qk_norm=False,
        window="stated",
        absent_window=4096,  # what `transformers` takes the absent key for; null means none
    ),
)
