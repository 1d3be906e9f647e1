"""A GGUF file as a checkpoint: config and tensors under the names of Hugging Face folders.

Needs numpy and the `gguf` package (its block formats only), not torch. One tensor is read at a
time. The arithmetic equals the GGUF import of `transformers`: blocks become float32, the rows of
`llama` query and key projections return to their original order, and the result is rounded to
bfloat16, nearest even.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from protocol.checkpoints.gguf_config import Facts, facts_of
from protocol.checkpoints.gguf_header import Header, TensorInfo, read_header
from protocol.errors import CheckpointError, UnsupportedModel

Float32 = npt.NDArray[np.float32]
Bits16 = npt.NDArray[np.uint16]

SLAB_BYTES: Final = 8 << 20  # packed bytes dequantised at a time: bounds the float32 copy
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


def round_to_bfloat16(values: Float32) -> Bits16:
    """The bit patterns of `values` in bfloat16: nearest, ties to even; NaN stays a quiet NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(
        16
    )
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


class GGUFModel:
    """Metadata and tensors of one GGUF file; opening reads and checks the header alone.

    Raises CheckpointError (damaged, incomplete, misshapen) or UnsupportedModel (architecture,
    block format or arithmetic that is not done here).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header: Header = read_header(path, _block)
        self.metadata: dict[str, Any] = header.metadata
        factors = header.tensors.pop(ROPE_FACTORS, None)
        self._facts: Facts = facts_of(
            header.metadata,
            frozenset(header.tensors),
            None if factors is None else self._floats(factors).ravel().tolist(),
            where=str(path),
        )
        self._tensors = {
            _hugging_face_name(name, self._facts.layers, str(path)): info
            for name, info in header.tensors.items()
        }
        self._check_shapes()

    @property
    def architecture(self) -> str:
        return self._facts.architecture

    def config(self) -> dict[str, Any]:
        """The contents of the `config.json` that describes this model."""
        return dict(self._facts.config)

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._info(name).shape

    def get(self, name: str) -> Float32:
        """The tensor in float32, rows in Hugging Face order."""
        info = self._info(name)
        values = self._floats(info)
        heads = self._heads_to_unpermute(info.name)
        return _unpermute(values, heads) if heads else values

    def get_bfloat16(self, name: str) -> Bits16:
        """The same, rounded to bfloat16 bit patterns without a float32 copy of the whole."""
        info = self._info(name)
        rows = np.empty((_rows(info), info.shape[-1]), np.uint16)
        for start, slab in self._slabs(info):
            rows[start : start + len(slab)] = round_to_bfloat16(slab)
        values = rows.reshape(info.shape)
        heads = self._heads_to_unpermute(info.name)
        return _unpermute(values, heads) if heads else values

    def _info(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        return self._tensors[name]

    def _heads_to_unpermute(self, name: str) -> int:
        """How many heads' rows llama.cpp interleaved in this tensor; 0: none."""
        if self._facts.architecture != "llama":
            return 0
        if ".attn_q." in name:
            return int(self._facts.config["num_attention_heads"])
        return int(self._facts.config["num_key_value_heads"]) if ".attn_k." in name else 0

    def _floats(self, info: TensorInfo) -> Float32:
        values = np.empty((_rows(info), info.shape[-1]), np.float32)
        for start, slab in self._slabs(info):
            values[start : start + len(slab)] = slab
        return values.reshape(info.shape)

    def _slabs(self, info: TensorInfo) -> Iterator[tuple[int, Float32]]:
        """(first row, float32 rows) over the tensor, a bounded number of bytes at a time."""
        row_bytes = info.size // _rows(info)
        step = max(1, SLAB_BYTES // row_bytes)
        kind = GGMLQuantizationType(info.kind)
        with self.path.open("rb") as file:
            file.seek(info.offset)
            for start in range(0, _rows(info), step):
                count = min(step, _rows(info) - start)
                packed = np.fromfile(file, np.uint8, count * row_bytes)
                if packed.size != count * row_bytes:
                    raise CheckpointError(f"{self.path}: the file shrank while it was read")
                yield start, dequantize(packed.reshape(count, row_bytes), kind)

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


def _rows(info: TensorInfo) -> int:
    count = 1
    for size in info.shape[:-1]:
        count *= size
    return count


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


@cache
def _dequantisable() -> Mapping[int, tuple[int, int]]:
    """Block (elements, bytes) of each ggml type that can be turned into float32."""
    known = {}
    for kind, (elements, size) in GGML_QUANT_SIZES.items():
        try:
            dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            continue
        known[int(kind)] = (elements, size)
    return known


def _block(kind: int) -> tuple[int, int] | None:
    return _dequantisable().get(kind)
