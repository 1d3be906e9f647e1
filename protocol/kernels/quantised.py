"""Products over weights of 8 or 4 bits, by the kernels that torch brings for a processor and CUDA.

Rows go in and come out as bfloat16 whatever the dtype around them is: on a processor the kernels
are quick in it alone (measured, AVX-512: 25 times slower in fp32), and CUDA's 4-bit kernel takes
no other. A row depends on nothing but itself. ADR 17 has the measurements.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from protocol.errors import UnsupportedModel
from protocol.gpu import CPU

Bits = Literal[8, 4]
Multiply = Callable[[Tensor, Tensor, Tensor], Tensor]  # rows bf16, packed, scales -> rows bf16

BITS: Final[Mapping[str, Bits]] = {"int8": 8, "int4": 4}  # as settings say it
COMPUTED: Final = torch.bfloat16
GROUP: Final = 32  # inputs that share a scale and a zero, of 4-bit weights; CUDA has 32 to 256
INPUTS: Final[Mapping[Bits, int]] = {8: 16, 4: GROUP}  # the kernels read so many at once, or more
OUTPUTS: Final = 16
MOST: Final[Mapping[Bits, int]] = {8: 127, 4: 15}
MIDDLE: Final = 8  # the 4-bit number that stands for a group's zero
LEAST_SCALE: Final = 1e-8  # of a row or group of zeros
KERNELS: Final[Mapping[tuple[bool, Bits], tuple[str, ...]]] = {  # of the CPU, or CUDA: how to
    (True, 8): ("_weight_int8pack_mm",),  # multiply, and how to pack where that is not plain
    (False, 8): ("_weight_int8pack_mm",),
    (True, 4): ("_weight_int4pack_mm_for_cpu", "_convert_weight_to_int4pack_for_cpu"),
    (False, 4): ("_weight_int4pack_mm", "_convert_weight_to_int4pack"),
}
INNER_TILES: Final = (8, 4, 2)  # of 16 inputs, that CUDA's packing can hold together


@dataclass(frozen=True, slots=True)
class Quantised:
    """``y = x @ W^T + b`` over packed integers and their scales; `Linear`'s calls."""

    weight: Tensor  # packed as the device's kernel reads it
    scales: Tensor  # 8 bits: [out]; 4 bits: [in / GROUP, out, 2], scale and zero
    bias: Tensor | None  # [out], bfloat16
    multiply: Multiply

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [rows, in] -> [rows, out], of the dtype of `x`."""
        return self._product(x).to(x.dtype)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual += x @ W^T + b`` in place; returns `residual` [rows, out]."""
        return residual.add_(self._product(x))

    def tensors(self) -> tuple[Tensor, ...]:
        """All that it holds."""
        parts = (self.weight, self.scales)
        return parts if self.bias is None else (*parts, self.bias)

    def _product(self, x: Tensor) -> Tensor:
        made = self.multiply(x.to(COMPUTED).contiguous(), self.weight, self.scales)
        return made if self.bias is None else made.add_(self.bias)


def quantise(
    weights: Iterable[Tensor], shape: tuple[int, int], bits: Bits, bias: Tensor | None = None
) -> Quantised:
    """Round several weights [out_i, in] to `bits` and pack them as one of `shape` [out, in].

    8 bits: symmetric, a scale for each output. 4 bits: a scale and a zero for each output and
    group of `GROUP` inputs, as tinygemm has them. Scales are rounded before the weights are, so
    that their own rounding costs nothing. The result lies on the device of the first.
    Raises UnsupportedModel for a shape that the kernels do not take (an 8-bit one reads past the
    end of a row of 24), and for a torch without them.
    """
    check_shape(shape, bits)
    integers, scales = _rounded(iter(weights), shape, bits)
    packed, multiply = _packed(integers, bits)
    return Quantised(packed, scales, None if bias is None else bias.to(COMPUTED), multiply)


def available(device: str = CPU) -> tuple[str, ...]:
    """The kinds of weights, as settings say them, for which this torch has kernels on `device`."""
    found = []
    for kind, bits in BITS.items():
        try:
            for name in KERNELS[device == CPU, bits]:
                _kernel(name)
        except UnsupportedModel:
            continue
        found.append(kind)
    return tuple(found)


def check_shape(shape: tuple[int, int], bits: Bits) -> None:
    """Raise UnsupportedModel, with the numbers, for what cannot be packed."""
    outputs, inputs = shape
    for count, multiple, word in ((inputs, INPUTS[bits], "inputs"), (outputs, OUTPUTS, "outputs")):
        if count % multiple:
            raise UnsupportedModel(
                f"int{bits} weights: {count} {word} of a product are no multiple of {multiple}"
            )


def packed_bytes(shape: tuple[int, int], bits: Bits) -> int:
    """What `Quantised` holds of a weight of `shape` [out, in], without a bias."""
    outputs, inputs = shape
    scales = outputs if bits == 8 else 2 * outputs * inputs // GROUP
    return outputs * inputs * bits // 8 + scales * COMPUTED.itemsize


def _rounded(
    weights: Iterable[Tensor], shape: tuple[int, int], bits: Bits
) -> tuple[Tensor, Tensor]:
    """Integers [out, in] and their scales, part by part: no second copy of the whole is made."""
    outputs, inputs = shape
    kind, scale = (torch.int8, _symmetric) if bits == 8 else (torch.int32, _grouped)
    integers, scales, start = torch.empty(0), [], 0
    for weight in weights:
        if start == 0:
            integers = torch.empty(shape, dtype=kind, device=weight.device)
        part = weight.float()
        found = scale(part)
        numbers = _numbers(part, found)
        integers[start : start + part.shape[0]].copy_(numbers)
        scales.append(found)
        start += part.shape[0]
    joined = torch.cat(scales)
    if bits == 8:
        return integers, joined
    pairs = joined.view(outputs, inputs // GROUP, 2)
    return integers, pairs.transpose(0, 1).contiguous()


def _symmetric(part: Tensor) -> Tensor:
    """A scale [out] for each row of `part` [out, in]."""
    return part.abs().amax(dim=1).clamp_(min=LEAST_SCALE).div_(MOST[8]).to(COMPUTED)


def _grouped(part: Tensor) -> Tensor:
    """Scale and zero [out, groups * 2] of each group of a row of `part` [out, in]."""
    groups = part.view(part.shape[0], -1, GROUP)
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    scale = (high - low).clamp_(min=LEAST_SCALE).div_(MOST[4]).to(COMPUTED)
    zero = (low + scale.float() * MIDDLE).to(COMPUTED)
    return torch.stack((scale, zero), dim=2).flatten(1)


def _numbers(part: Tensor, scales: Tensor) -> Tensor:
    """The integers [out, in] that stand for `part` [out, in] by `scales`."""
    if scales.dim() == 1:
        most = MOST[8]
        return part.div(scales.float()[:, None]).round_().clamp_(-most, most)
    pairs = scales.float().view(part.shape[0], -1, 2)
    groups = part.view(part.shape[0], -1, GROUP)
    steps = groups.sub(pairs[..., 1:]).div_(pairs[..., :1]).add_(MIDDLE)
    return steps.round_().clamp_(0, MOST[4]).view(part.shape)


def _packed(integers: Tensor, bits: Bits) -> tuple[Tensor, Multiply]:
    """As the kernel of the integers' device reads them, and that kernel."""
    here = integers.device.type == CPU
    multiply, *packers = (_kernel(name) for name in KERNELS[here, bits])
    if not packers:
        return integers, multiply
    (pack,) = packers
    if here:
        return pack(integers, 1), _in_groups(multiply)
    # Two numbers to a byte, the earlier one in the upper half.
    pairs = integers[:, ::2].bitwise_left_shift(4).bitwise_or_(integers[:, 1::2])
    tiles = next(count for count in INNER_TILES if integers.shape[1] % (count * 16) == 0)
    return pack(pairs.to(torch.uint8).contiguous(), tiles), _in_groups(multiply)


def _in_groups(kernel: Callable[..., Tensor]) -> Multiply:
    def multiply(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        return kernel(x, weight, GROUP, scales)

    return multiply


def _kernel(name: str) -> Callable[..., Tensor]:
    """An operator of torch that its documentation leaves out, so that it may go."""
    try:
        packet = getattr(torch.ops.aten, name)
    except AttributeError as error:
        raise UnsupportedModel(
            f"weights of 8 or 4 bits: this torch ({torch.__version__}) has no {name}; torch 2.9 "
            "and later have it"
        ) from error
    kernel: Callable[..., Tensor] = packet.default
    return kernel
