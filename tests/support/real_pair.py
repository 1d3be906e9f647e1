"""The default model and its draft, loaded once in this process: the engines that daemons run."""

import os
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from draft_daemon.checkpoint import load_draft
from draft_daemon.engine import Engine as DraftEngine
from launch.drafts import resolve_draft
from launch.events import TargetFacts
from launch.inprocess import run_spec_decode
from launch.models import DEFAULT_NAME, resolve_model
from launch.policy import AUTO, FULL
from launch.store import default_home
from launch.token_ids import unpack_ids
from protocol.checkpoints.draft_config import read_draft_config
from protocol.config import RING_SOCKET, TargetConfig
from protocol.cpu import usable_cores
from protocol.transports.local import TRANSPORT
from target_daemon.checks import Limits
from target_daemon.engine import Engine as TargetEngine
from target_daemon.families.base import NativeTarget, load_target
from target_daemon.prefix_folder import PrefixFolder
from target_daemon.prefix_identity import prefix_identity

LIFE, NONCE = 1, 1
CONTEXT = 4096  # rows: more than any prompt of the proofs and its text
POSITIONS = 2048


@dataclass(frozen=True)
class Checkpoints:
    """Where the default pair lies on this machine."""

    model: Path
    draft: Path


@dataclass(frozen=True)
class Run:
    """One generation: its ids, and the tokens that each round emitted."""

    token_ids: tuple[int, ...]
    rounds: tuple[int, ...]
    seconds: float
    finish: str = ""
    proposed: tuple[bytes, ...] = ()
    kept: int = 0  # positions of the prompt that had state already
    parents: tuple[bytes, ...] = ()  # of each round that verified a tree; empty for a chain


def default_checkpoints(*, allow_pull: bool = False) -> Checkpoints:
    """The default pair; ModelNotFound where it was not pulled."""
    home = default_home(os.environ)
    model = resolve_model(DEFAULT_NAME, home=home, allow_pull=allow_pull)
    draft = resolve_draft(None, model)
    assert draft is not None
    return Checkpoints(model.path, draft)


class RealPair:
    """Both engines over the `local` transport, driven by the session of `launch.inprocess`."""

    def __init__(
        self,
        target: NativeTarget,
        draft: DraftEngine,
        block_size: int,
        *,
        context: int = CONTEXT,
        prefix_bytes: int = 0,
        shelf=None,
    ) -> None:
        self.target = target
        self.draft = draft
        self._block_size, self._context = block_size, context
        limits = Limits(target.prefill_chunk, target.max_width, prefix_bytes=prefix_bytes)
        self.engine = TargetEngine(target, limits, target.ring, shelf=shelf)
        self.last_sequence = 0
        self._facts = TargetFacts(
            LIFE,
            target.vocab_size,
            target.max_positions,
            target.prefill_chunk,
            target.ring.shape.capacity,
            target.max_width,
            target.exactness.kind,
            tree_verify=target.supports_tree_verify,
            tree_detail=target.tree_detail,
        )

    @property
    def exact(self) -> str:
        """What the load-time probe said: native, padded or no."""
        return self.target.exactness.kind

    def run(
        self,
        prompt,
        max_tokens: int,
        *,
        speculative: bool,
        sampling=None,
        block_width=FULL,
        draft=None,
        **options,
    ) -> Run:
        """Text of at most `max_tokens` tokens, greedy unless `sampling` says otherwise.

        `draft` stands in for the pair's own; `options` are further ones of `run_spec_decode`.
        """
        self.last_sequence += 1
        pieces = []
        began = time.perf_counter()
        result = run_spec_decode(
            self.engine,
            (draft or self.draft) if speculative else None,
            prompt,
            max_tokens,
            facts=self._facts,
            block_size=self._block_size,
            draft_context=self._context,
            sampling=sampling,
            block_width=block_width,
            on_piece=pieces.append,
            sequence=self.last_sequence,
            **options,
        )
        mode = "speculative" if speculative else "autoregressive"
        assert block_width == AUTO or result.statistics.mode == mode, result.statistics.mode_reason
        seconds, rounds = time.perf_counter() - began, [piece for piece in pieces if piece.width]
        return Run(
            result.token_ids,
            tuple(len(unpack_ids(piece.tokens)) for piece in rounds),
            seconds,
            result.finish_reason,
            tuple(piece.proposed for piece in rounds),
            result.statistics.num_kept_tokens,
            tuple(piece.parents for piece in rounds),
        )

    def target_gap(self, text, *tokens: int) -> float:
        """How far below the best logit after `text` the worst of `tokens` lies."""
        chunk, logits = self.target.prefill_chunk, None
        for start in range(0, len(text), chunk):
            ids = torch.tensor(text[start : start + chunk])
            logits = self.target.verify_batch(0, ids, start, "last")
        assert logits is not None
        return _gap(logits[0], tokens)

    def draft_gap(self, prompt, max_tokens: int, number: int, slot: int, token: int) -> float:
        """How far below the draft's best the logit of `token` lies: round `number`, draft `slot`.

        Where `token` is the best itself, how far below it the second best lies.
        """
        borrowed, seen = self.draft._lexicon, []
        best = borrowed.best

        def record(hidden):
            seen.append(hidden.clone())
            return best(hidden)

        borrowed.best = record
        try:
            self.run(prompt, max_tokens, speculative=True)
        finally:
            del borrowed.best
        with torch.inference_mode():
            logits = borrowed.head(seen[number][slot : slot + 1])[0]
        second = int(logits.topk(2).indices[1])
        return _gap(logits, (second if int(logits.argmax()) == token else token,))


def _gap(logits, tokens) -> float:
    return float(logits.max() - min(logits[token] for token in tokens))


@contextmanager
def real_pair(
    checkpoints: Checkpoints,
    *,
    dtype: str,
    exact: bool,
    threads: int = 0,
    context: int = CONTEXT,
    prefix_bytes: int = 0,
    store: Path | None = None,
    **settings,
):
    """Load the pair with as many threads as a daemon would take; all is undone at the end.

    `store` is a folder for kept prefixes. `settings` are those of the target's config, and
    `context` the draft's window.
    """
    before = torch.get_num_threads()
    with ExitStack() as stack:
        torch.set_num_threads(threads or usable_cores())
        stack.callback(torch.set_num_threads, before)
        facts = read_draft_config(checkpoints.draft)
        block = facts.max_proposals + 1
        place = Path(f"/in-process/{os.getpid()}/{time.monotonic_ns()}")  # a key, never a folder
        fixed = {"slots": 1, "max_positions": POSITIONS} | settings
        config = TargetConfig(
            model=str(checkpoints.model),
            run_dir=str(place),
            life=LIFE,
            dtype=dtype,
            exact=exact,
            taps=facts.target_layer_ids,
            block_size=block,
            mask_token_id=facts.mask_token_id,
            **fixed,
        )
        host = TRANSPORT.host(place)
        stack.callback(host.close)
        target = load_target(config, host)
        host.offer(NONCE, LIFE)
        guest = TRANSPORT.attach(
            str(place / RING_SOCKET), nonce=NONCE, life=LIFE, shape=target.ring.shape, timeout=1.0
        )
        stack.callback(guest.close)
        draft = DraftEngine(
            load_draft(checkpoints.draft, target.dtype),
            guest,
            vocab_size=target.vocab_size,
            slots=config.slots,
            context_window=context,
            max_ingest=min(context, 256),
        )
        draft.warm_up()
        shelf = None
        if store is not None:
            identity = prefix_identity(target, checkpoints.model)
            shelf = PrefixFolder.open(store, identity, 1 << 30)
        yield RealPair(
            target, draft, block, context=context, prefix_bytes=prefix_bytes, shelf=shelf
        )
