"""A GGUF file as a target's checkpoint: config and tensors under the names of Hugging Face folders.

The arithmetic is that of `protocol.checkpoints.gguf_file`; the rows of `llama` query and key
projections return to their original order.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from protocol.checkpoints.gguf_config import Facts, facts_of
from protocol.checkpoints.gguf_file import GGUFFile, floats, open_header
from protocol.checkpoints.gguf_header import TensorInfo
from protocol.errors import CheckpointError, UnsupportedModel

ROPE_FACTORS: Final = "rope_freqs.weight"
TOP: Final[Mapping[str, str]] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER: Final[Mapping[str, str]] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_NAME: Final = re.compile(r"blk\.(\d{1,6})\.([a-z_]+)\.(weight|bias)")


class GGUFModel(GGUFFile):
    """Metadata and tensors of one GGUF file; opening reads and checks the header alone.

    Raises CheckpointError (damaged, incomplete, misshapen) or UnsupportedModel (architecture,
    block format or arithmetic that is not done here).
    """

    def __init__(self, path: Path) -> None:
        header = open_header(path)
        self.metadata: dict[str, Any] = header.metadata
        factors = header.tensors.pop(ROPE_FACTORS, None)
        self._facts: Facts = facts_of(
            header.metadata,
            frozenset(header.tensors),
            None if factors is None else floats(path, factors).ravel().tolist(),
            where=str(path),
        )
        super().__init__(
            path,
            {
                _hugging_face_name(name, self._facts.layers, str(path)): info
                for name, info in header.tensors.items()
            },
        )
        self._check_shapes()

    @property
    def architecture(self) -> str:
        return self._facts.architecture

    def config(self) -> dict[str, Any]:
        """The contents of the `config.json` that describes this model."""
        return dict(self._facts.config)

    def _ordered(self, info: TensorInfo, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        heads = self._heads_to_unpermute(info.name)
        return _unpermute(values, heads) if heads else values

    def _heads_to_unpermute(self, name: str) -> int:
        """How many heads' rows llama.cpp interleaved in this tensor; 0: none."""
        if self._facts.architecture != "llama":
            return 0
        if ".attn_q." in name:
            return int(self._facts.config["num_attention_heads"])
        return int(self._facts.config["num_key_value_heads"]) if ".attn_k." in name else 0

    def _check_shapes(self) -> None:
        expected = self._facts.shapes()
        for name, shape in expected.items():
            found = self._info(name).shape
            if found != shape:
                raise CheckpointError(
                    f"{self.path}: tensor {name}: expected shape {list(shape)}, found {list(found)}"
                )
        extra = sorted(self.names() - expected.keys())
        if extra:
            raise UnsupportedModel(f"{self.path}: tensor {extra[0]} has no place in this model")


def _unpermute(values: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Undo llama.cpp's order of rotary pairs: [heads, half, 2] rows back to [heads, 2, half]."""
    half = values.shape[0] // heads // 2
    split = values.reshape(heads, half, 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))


def _hugging_face_name(name: str, layers: int, where: str) -> str:
    if name in TOP:
        return TOP[name]
    match = _BLOCK_NAME.fullmatch(name)
    if match is None or match[2] not in LAYER or int(match[1]) >= layers:
        raise UnsupportedModel(f"{where}: tensor {name} has no place in a model of {layers} layers")
    return f"model.layers.{int(match[1])}.{LAYER[match[2]]}.{match[3]}"
