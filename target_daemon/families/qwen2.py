"""Qwen2 and Qwen2.5: biased query, key and value; a window only where it is switched on."""

from typing import Final

from target_daemon.dense.layout import Rules
from target_daemon.dense.model import DenseFamily

FAMILY: Final = DenseFamily(
    ("qwen2",),
    Rules(qkv_bias="always", output_bias="never", qk_norm=False, window="switched"),
)
