"""Where a draft's embedding and head come from: mapped, read from a file, or the target itself."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from draft_daemon.checkpoint import LoadedDraft
from draft_daemon.chosen import Chosen
from draft_daemon.head import Borrowed, scorer
from protocol.checkpoints.identity import identify
from protocol.config import DraftConfig
from protocol.errors import ConfigError, DraftMismatch, UnsupportedModel
from protocol.lent_weights import lent_weights, weights_hash
from protocol.messages import Attached, Pair, Sampling
from protocol.transports.base import FeatureGuest, RemoteTarget


class Lexicon(Protocol):
    """Turns ids into block rows, and hidden rows into ids."""

    @property
    def scored(self) -> bool:
        """Whether it sees scores, so that it can tell how likely an id is."""
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """Rows [n, hidden] of `ids` [n] in the draft's dtype."""
        ...

    def best(self, hidden: Tensor) -> Chosen:
        """The most likely id of each row of `hidden` [n, hidden]."""
        ...

    def drawn(
        self, hidden: Tensor, position: int, sampling: Sampling, temperatures: Sequence[float]
    ) -> Chosen:
        """An id for each row of `hidden` [n, hidden], the first of which is at `position`.

        Each is what the target would choose with these scores at its temperature; 0: the best.
        Its confidence is its share of the softmax at that temperature, 0: at 1.
        """
        ...

    def likeliest(
        self,
        hidden: Tensor,
        count: int,
        position: int,
        sampling: Sampling,
        temperatures: Sequence[float],
    ) -> tuple[Tensor, Tensor]:
        """At most `count` ids [n, few] of each row, the one to propose first, and their logs.

        Ordered as `drawn` would choose among them; without temperatures, by likelihood.
        """
        ...


class Asked:
    """The target is asked (``--draft-head target``): a round trip for each of the two."""

    def __init__(
        self,
        draft: LoadedDraft,
        target: RemoteTarget,
        logit_scale: float = 1.0,
        logit_softcap: float = 0.0,
    ) -> None:
        """Scale and cap are the target's, for a head of the draft's own: see `scorer`.

        Raises UnsupportedModel for a head that must see the target's logits.
        Raises ConfigError for a vocabulary: the target scores all ids.
        """
        network = type(draft.network)
        if network.needs_logits:
            raise UnsupportedModel(
                f"--draft-head target gives ids, and the head of {network.__name__} needs the "
                "target's logits: load them from the target's checkpoint on the draft's host"
            )
        if draft.vocabulary is not None:
            raise ConfigError(
                "--draft-vocab is for a head that the draft has; with --draft-head target it is "
                "the target that scores"
            )
        scale = target.facts.embedding_scale
        if scale != 1.0:
            raise UnsupportedModel(
                f"--draft-head target: this target scales its embeddings by {scale:g}, and a draft "
                "reads them unscaled: load them from the target's checkpoint on the draft's host"
            )
        self._target = target
        self._dtype, self._device = draft.network.dtype, draft.network.device
        self._scale = draft.config.embedding_scale
        own = draft.own_head
        self._own = (
            None
            if own is None
            else scorer(draft, own.head, own.target_ids, logit_scale, logit_softcap)
        )

    @property
    def scored(self) -> bool:
        return self._own is not None

    def embed(self, ids: Tensor) -> Tensor:
        rows = self._target.embed(tuple(ids.tolist())).to(self._device, self._dtype)
        return rows if self._scale == 1.0 else rows * self._scale

    def best(self, hidden: Tensor) -> Chosen:
        """The most likely id of each row of `hidden`; the target's answer says no more than ids."""
        if self._own is None:
            return Chosen(self._target.project(hidden))
        return self._own.best(hidden)

    def drawn(
        self, hidden: Tensor, position: int, sampling: Sampling, temperatures: Sequence[float]
    ) -> Chosen:
        """The best ids: the target answers no scores to add noise to."""
        del position, sampling, temperatures
        return self.best(hidden)

    def likeliest(
        self,
        hidden: Tensor,
        count: int,
        position: int,
        sampling: Sampling,
        temperatures: Sequence[float],
    ) -> tuple[Tensor, Tensor]:
        """The best ids alone, each for certain where there are no scores."""
        del count, position, sampling, temperatures
        best = self.best(hidden)
        ids = torch.tensor(best.ids)[:, None]
        return ids, torch.tensor(best.confidences or (1.0,) * len(best.ids)).log()[:, None]


def lexicon(draft: LoadedDraft, guest: FeatureGuest, pair: Pair, config: DraftConfig) -> Lexicon:
    """What fits the guest's target and the draft's settings.

    Raises ConfigError where the settings name nothing that can be had here, and DraftMismatch
    where the checkpoint on this host is another than the target's.
    """
    remote, scale, cap = guest.remote, pair.logit_scale, pair.logit_softcap
    if remote is None:
        if config.draft_head == "target":
            raise ConfigError(
                f"--draft-head target is for a target on another host; {pair.transport} shares "
                "its embedding and head"
            )
        return Borrowed(draft, guest.weights(), pair.vocab_size, scale, cap)
    if config.draft_head == "target":
        return Asked(draft, remote, scale, cap)
    if not config.target_model:
        raise ConfigError(
            "the target is on another host: name its checkpoint on this one (--target-model), or "
            "have the target asked for embedding and head (--draft-head target)"
        )
    path = Path(config.target_model)
    check_same(path, remote.facts)
    weights = lent_weights(path, getattr(torch, pair.dtype))
    return Borrowed(draft, weights, pair.vocab_size, scale, cap)


def check_same(path: Path, target: Attached) -> None:
    """Raise DraftMismatch unless the checkpoint at `path` is the one that the target has."""
    ours = identify(path)
    pairs = (
        ("config", target.config_hash, ours.config),
        ("tokenizer", target.tokenizer_hash, ours.tokenizer),
        ("embedding and head", target.weights_hash, weights_hash(path)),
    )
    for what, theirs, here in pairs:
        if theirs != here:
            raise DraftMismatch(
                f"{path} is another checkpoint than the target's: the digest of its {what} is "
                f"{here[:12] or 'none'}, the target's {theirs[:12] or 'none'}"
            )
