"""What a draft on another host asks its target for: feature rows, embeddings, best ids.

Answered between two rounds, by the loop that answers the supervisor: `target_daemon.daemon` hands
every message of a draft to this one.
"""

import functools
from pathlib import Path
from typing import assert_never

import torch

from protocol.checkpoints.identity import Identity, identify
from protocol.codec import pack_tokens, unpack_tokens
from protocol.errors import ProtocolError, UnsupportedModel
from protocol.lent_weights import weights_hash
from protocol.messages import (
    MAX_RAW_BYTES,
    Attach,
    Attached,
    Embed,
    Embedded,
    Project,
    Projected,
    Rows,
)
from protocol.state import FeatureReply, FeatureRequest
from protocol.transports.tcp import FLOAT_BYTES, RowsDesk
from target_daemon.checks import check_vocabulary
from target_daemon.families.base import NativeTarget


class Lender:
    """Over one loaded target, read from `checkpoint`; never changes anything of it."""

    def __init__(self, target: NativeTarget, checkpoint: Path) -> None:
        self._target = target
        self._checkpoint = checkpoint
        self._desk = RowsDesk(target.ring)

    @torch.inference_mode()
    def handle(self, message: FeatureRequest, offered: tuple[int, int]) -> FeatureReply:
        """Answer one message; `offered` are the nonce and the life that a draft must name."""
        match message:
            case Attach():
                self._desk.check(message, offered)
                return self._attached(message)
            case Rows():
                return self._desk.rows(message)
            case Embed():
                return self._embedded(message)
            case Project():
                return self._projected(message)
            case _:
                assert_never(message)

    @functools.cached_property
    def _facts(self) -> tuple[Identity, str]:
        """Of the checkpoint; read when the first draft asks."""
        return identify(self._checkpoint), weights_hash(self._checkpoint)

    def _attached(self, asked: Attach) -> Attached:
        identity, weights = self._facts
        return Attached(
            target_life=asked.target_life,
            draft_life=asked.draft_life,
            config_hash=identity.config,
            tokenizer_hash=identity.tokenizer,
            weights_hash=weights,
            embedding_scale=self._target.embedding_scale,
        )

    def _embedded(self, asked: Embed) -> Embedded:
        target, ids = self._target, unpack_tokens(asked.tokens)
        if target.embedding_scale != 1.0:
            raise UnsupportedModel(
                f"this target scales its embeddings by {target.embedding_scale:g}, and a draft "
                "reads them unscaled: load them from its checkpoint on the draft's host"
            )
        check_vocabulary(ids, 0, target.padded_vocab_size)
        if len(ids) * target.hidden_size * FLOAT_BYTES > MAX_RAW_BYTES:
            raise ProtocolError(f"{len(ids)} embeddings do not fit a message")
        rows = target.embed_tokens(torch.tensor(ids, dtype=torch.int64)).float()
        return Embedded(
            target_life=asked.target_life,
            draft_life=asked.draft_life,
            pull=asked.pull,
            raw=rows.contiguous().numpy().tobytes(),
        )

    def _projected(self, asked: Project) -> Projected:
        width = self._target.hidden_size * FLOAT_BYTES
        if not asked.raw or len(asked.raw) % width:
            raise ProtocolError(f"{len(asked.raw)} bytes are no hidden rows of {width}")
        hidden = torch.frombuffer(bytearray(asked.raw), dtype=torch.float32)
        hidden = hidden.view(-1, self._target.hidden_size)
        if not bool(hidden.isfinite().all()):
            raise ProtocolError("hidden rows hold NaN or infinity")
        ids = self._target.project_hidden_to_tokens(hidden)
        return Projected(
            target_life=asked.target_life,
            draft_life=asked.draft_life,
            pull=asked.pull,
            tokens=pack_tokens(ids.tolist()),
        )
