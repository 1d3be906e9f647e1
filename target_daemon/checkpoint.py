"""A checkpoint that is read once, completely: missing and unknown tensors are errors.

The loader asks for each tensor with the shape that the config implies; whatever it did not ask
for is reported at the end, since an unread tensor means a layer that would silently be left out.
"""

from collections.abc import Iterable
from typing import Final

from torch import Tensor

from protocol.checkpoints.tensors import TensorSource
from protocol.errors import CheckpointError

# Buffers that old checkpoints stored; they are functions of the config.
DERIVED: Final = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
SHOWN: Final = 5


class Checkpoint:
    """Reads tensors of `source` by name and keeps account of what was read."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._read: set[str] = set()

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor as a view of the file; CheckpointError: name, expected and found."""
        self._read.add(name)
        return self._source.expect(name, shape)

    def finish(self, ignore: Iterable[str] = ()) -> None:
        """Raise CheckpointError if a tensor was left unread, but for `ignore` and buffers."""
        left = sorted(
            name
            for name in self._source.names() - self._read - set(ignore)
            if not name.endswith(DERIVED)
        )
        if left:
            more = f" and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
            raise CheckpointError(
                f"the checkpoint has tensors that this family does not know: "
                f"{', '.join(left[:SHOWN])}{more}"
            )
