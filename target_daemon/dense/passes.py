"""A target that runs a forward in passes whose rows do not depend on how many there are."""

from abc import abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from protocol.kernels.linear import Head
from target_daemon.dense.places import Line
from target_daemon.exactness import AttentionShape, Widths
from target_daemon.families.base import NativeTarget
from target_daemon.target import Logits


class Ends(Protocol):
    """What stands behind the layers."""

    @property
    def norm(self) -> "Normaliser":
        """The final norm."""
        ...

    @property
    def head(self) -> Head:
        """The head."""
        ...


class Normaliser(Protocol):
    """A norm over rows [..., hidden]."""

    def __call__(self, x: Tensor) -> Tensor:
        """Rows of the same shape."""
        ...


class PassedTarget(NativeTarget):
    """Cuts forwards as `widths` says, and scores hidden rows by its own head."""

    embedding_scale = 1.0
    logit_scale = 1.0
    logit_softcap = 0.0
    widths: Widths

    @property
    @abstractmethod
    def ends(self) -> Ends:
        """The final norm and the head."""

    def run_passes(
        self, run: "RunPass", slot: int, tokens: Tensor, base_pos: int, logits: Logits
    ) -> Tensor | None:
        """What `verify_batch` returns, each pass by ``run(slot, its tokens, its line)``."""
        answers: list[Tensor] = []
        count = tokens.shape[0]
        for start, stop, rows in self.widths.passes(count):
            wanted = "none" if logits == "last" and stop < count else logits
            hidden = run(slot, tokens[start:stop], Line(base_pos + start, stop - start, rows))
            if wanted == "all":
                answers.append(self._logits(hidden)[: stop - start])
            elif wanted == "last":
                answers.append(self._last(hidden, stop - start))
        if not answers:
            return None
        return answers[0] if len(answers) == 1 else torch.cat(answers)

    def _last(self, hidden: Tensor, count: int) -> Tensor:
        """Logits of row ``count - 1``, computed among `least` rows: the head's width counts too."""
        least = self.widths.least
        first = max(0, min(count - 1, hidden.shape[0] - least))
        return self._logits(hidden[first : first + least])[count - 1 - first :][:1]

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.ends.head(self.ends.norm(hidden)).float()

    @torch.inference_mode()
    def project_hidden_to_tokens(self, hidden: Tensor) -> Tensor:
        return self.ends.head(hidden.to(self.dtype)).float().argmax(dim=-1)

    @torch.inference_mode()
    def project_hidden_to_topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        scores = self.ends.head(hidden.to(self.dtype)).float()
        best, ids = scores.topk(k, dim=-1)
        return best - scores.logsumexp(dim=-1, keepdim=True), ids

    def _shape(self, heads: tuple[int, int, int], capacity: int) -> AttentionShape:
        """The attention of `heads` (query heads, key heads, their size) over `capacity` rows."""
        query, kv, size = heads
        return AttentionShape(kv, query // kv, size, capacity, self.dtype, self.device)


class RunPass(Protocol):
    """Runs one pass through the layers."""

    def __call__(self, slot: int, tokens: Tensor, line: Line, /) -> Tensor:
        """The residual stream [rows, hidden] after the last layer."""
        ...
