"""Answers of many prompts at once: slots that go forward together and refill as texts end."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from protocol.checkpoints.shards import Array, Example
from protocol.errors import DaemonError, UsageError
from protocol.messages import Sampling
from protocol.training import Answered, Ask, Kept
from target_daemon.collecting.choosing import Chooser, Chosen
from target_daemon.collecting.forwards import Forwards, Step
from target_daemon.collecting.likeliest import likeliest
from target_daemon.collecting.order import Move, enter, leave
from target_daemon.collecting.records import Records
from target_daemon.sequences import resolved

CHUNK_ROWS: Final = 512  # of prompts that one forward takes beside the rows of all slots


@dataclass(slots=True)
class Text:
    """One ask in its slot. ``tokens[done:]`` have not been run."""

    ask: Ask
    sampling: Sampling
    stops: frozenset[int]
    tokens: list[int]
    most: int  # tokens, with the prompt
    done: int = 0

    @property
    def prompt(self) -> int:
        """Its length."""
        return len(self.ask.tokens)


@dataclass(frozen=True, slots=True)
class Finished:
    """An answer, and where the ask was for one that is kept, what of it goes into a shard."""

    answer: Answered
    example: Example | None = None
    features: Array | None = None


class Decoder:
    """Holds the texts in the slots; `step` takes all of them further by a row at least."""

    def __init__(
        self,
        forwards: Forwards,
        records: Records,
        chooser: Chooser,
        *,
        slots: int,
        vocab_size: int,
        eos: tuple[int, ...],
        likeliest: int,
    ) -> None:
        self._forwards, self._records, self._chooser = forwards, records, chooser
        self._slots, self._vocab_size, self._eos = slots, vocab_size, eos
        self._likeliest = min(likeliest, vocab_size)
        self._texts: list[Text] = []

    @property
    def open(self) -> int:
        """Texts that have not ended."""
        return len(self._texts)

    @property
    def answering(self) -> int:
        """Tokens of their answers so far."""
        return sum(len(text.tokens) - text.prompt for text in self._texts)

    @property
    def free(self) -> int:
        """Asks that `begin` can take."""
        return self._slots - len(self._texts)

    def begin(self, ask: Ask) -> None:
        """Take an ask into a free slot. UsageError for one that cannot be answered."""
        most = self._records.positions
        if not ask.tokens or len(ask.tokens) >= most:
            raise UsageError(f"a prompt of {len(ask.tokens):,} tokens; 1 to {most - 1:,} are taken")
        if max(ask.tokens) >= self._vocab_size:
            raise UsageError(
                f"token id {max(ask.tokens)}; this target's are 0 to {self._vocab_size - 1}"
            )
        sampling = resolved(ask.sampling, self._eos, self._vocab_size)
        sampling = msgspec.structs.replace(sampling, prompt_tokens=len(ask.tokens))
        ends = () if sampling.ignore_eos else sampling.eos_token_ids
        stops = frozenset((*sampling.stop_token_ids, *ends))
        limit = min(most, len(ask.tokens) + ask.max_tokens)
        text = Text(ask, sampling, stops, list(ask.tokens), limit)
        slot, moves = enter([len(each.tokens) for each in self._texts], text.prompt)
        self._texts.append(text)
        self._move(moves)
        self._texts[slot] = text
        self._forwards.start(slot)

    def step(self) -> list[Finished]:
        """One forward; the texts that ended with it."""
        steps = self._plan()
        hidden = self._forwards.run(steps, self._records)
        for text, step in zip(self._texts, steps, strict=True):
            text.done = step.last + 1
        ready = [at for at, text in enumerate(self._texts) if text.done == len(text.tokens)]
        if not ready:
            return []
        logits = self._forwards.score(hidden if len(ready) == len(hidden) else hidden[ready])
        self._note(ready, logits)
        rows = [Chosen(self._texts[slot].sampling, self._texts[slot].tokens) for slot in ready]
        choices, finished = self._chooser.choose(logits, rows), list[Finished]()
        # From the end: a text moves to a slot before its own, once it has been looked at.
        for slot, choice in reversed(list(zip(ready, choices, strict=True))):
            ended = self._take(slot, choice)
            if ended is not None:
                finished.append(ended)
                self._close(slot)
        return finished

    def _plan(self) -> list[Step]:
        """A row of each text, the next; and what else of their prompts there is room for."""
        steps, room = [], CHUNK_ROWS
        for text in self._texts:
            count = min(len(text.tokens) - text.done, room + 1)
            steps.append(Step(text.done, text.tokens[text.done : text.done + count]))
            room -= count - 1
        return steps

    def _note(self, ready: Sequence[int], logits: Tensor) -> None:
        kept = [at for at, slot in enumerate(ready) if self._texts[slot].ask.kept is not None]
        if not kept:
            return
        slots = torch.tensor([ready[at] for at in kept])
        positions = torch.tensor([self._texts[ready[at]].done - 1 for at in kept])
        found = likeliest(logits if len(kept) == len(ready) else logits[kept], self._likeliest)
        self._records.note(slots, positions, *found)

    def _take(self, slot: int, choice: int | DaemonError) -> Finished | None:
        """Let the text go on with its next token, or end."""
        text = self._texts[slot]
        if isinstance(choice, DaemonError):
            self._forwards.forget(slot, text.done)
            return Finished(refused(text.ask, choice))
        text.tokens.append(choice)
        reason: Literal["stop", "length"] = "stop" if choice in text.stops else "length"
        if reason == "length" and len(text.tokens) < text.most:
            return None
        answer = text.tokens[text.prompt : len(text.tokens) - (reason == "stop")]
        told = Answered(id=text.ask.id, tokens=tuple(answer), finish_reason=reason)
        if text.ask.kept is None:
            return Finished(told)
        features = self._records.features(slot, len(text.tokens))
        return Finished(told, self._example(slot, text, text.ask.kept), features)

    def _example(self, slot: int, text: Text, kept: Kept) -> Example:
        top_ids, top_logprobs = self._records.top(slot, text.prompt, len(text.tokens))
        return Example(
            id=text.ask.id,
            task=kept.task,
            held_out=kept.held_out,
            temperature=text.sampling.temperature,
            prompt=text.prompt,
            tokens=np.array(text.tokens, np.int32),
            top_ids=top_ids,
            top_logprobs=top_logprobs,
        )

    def _close(self, slot: int) -> None:
        """Free a slot; others move up, so that all stand together."""
        self._move(leave([len(each.tokens) for each in self._texts], slot))
        self._texts.pop()

    def _move(self, moves: Sequence[Move]) -> None:
        for source, goal in moves:
            self._texts[goal] = text = self._texts[source]
            self._forwards.move(source, goal, text.done)
            self._records.move(source, goal, text.done)


def refused(ask: Ask, error: DaemonError) -> Answered:
    """The answer to an ask that cannot be answered."""
    return Answered(id=ask.id, tokens=(), finish_reason="refused", detail=str(error))
