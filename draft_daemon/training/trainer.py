"""The loop: steps, validations, states; it ends with its schedule, or when it is told to."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from draft_daemon.training.batches import Goals, Lexicon, batch_of
from draft_daemon.training.curve import draw
from draft_daemon.training.data import Corpus, Place, Text
from draft_daemon.training.export import export, rounded
from draft_daemon.training.journal import Journal, Stepped, read_journal
from draft_daemon.training.loss import weighted_loss
from draft_daemon.training.network import Network
from draft_daemon.training.optimiser import Average, Optimiser
from draft_daemon.training.order import Order, Step
from draft_daemon.training.ranks import Ranks
from draft_daemon.training.schedule import schedule_of
from draft_daemon.training.state import AVERAGE, WEIGHTS, Counts, Origin, write_state
from draft_daemon.training.walk import walk
from protocol.ending import Ended, EndingSignals
from protocol.errors import NotFinite
from protocol.training import (
    CURVE_FILE,
    STEPS_FILE,
    Report,
    TrainConfig,
    Trained,
    TrainLine,
    Validated,
)

REPORT_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is made of."""

    network: Network
    walked: Network  # the same shape, for weights as they are exported
    optimiser: Optimiser
    average: Average
    corpus: Corpus
    order: Order
    goals: Goals
    lexicon: Lexicon
    raw: dict[str, Any]  # the draft's config.json
    origin: Origin


class Trainer:
    """One run, from `counts` on."""

    def __init__(
        self,
        config: TrainConfig,
        parts: Parts,
        counts: Counts,
        ranks: Ranks,
        endings: EndingSignals,
        say: Callable[[TrainLine], None],
    ) -> None:
        self._config, self._schedule, self._parts = config, schedule_of(config), parts
        self._counts, self._ranks, self._endings, self._say = counts, ranks, endings, say
        self._folder = Path(config.folder)
        self._module: nn.Module = ranks.wrapped(parts.network)
        self._began = time.monotonic() - counts.seconds
        self._saved = time.monotonic()
        self._told = 0.0
        self._texts: list[Text] = []  # that are walked, once they were read
        self._journal = Journal(self._folder / STEPS_FILE) if ranks.leads else None

    def run(self) -> Trained:
        """Train to the end of the schedule; raises Ended, with a state on the disk, before that.

        NotFinite, without one, where a step cannot be taken.
        """
        try:
            while not self._round():
                pass
        except Ended:
            self._save()
            raise
        finally:
            if self._journal is not None:
                self._journal.close()
        self._save()
        facts, steps = self._parts.corpus.facts, self._counts.step
        return Trained(
            steps=steps,
            seconds=self._seconds(),
            tokens=facts.tokens,
            passes=self._parts.order.passes(steps),
        )

    def _round(self) -> bool:
        """Validate if it is time, then step; True when there is nothing left to do."""
        step, device = self._counts.step, self._parts.lexicon.head.device
        progress = self._schedule.progress(step, self._seconds())
        progress, ended = self._ranks.agreed(progress, ended=self._endings.ended(), device=device)
        if ended:
            raise Ended(self._endings.reason or "another rank was told to end")
        over = progress >= 1
        due = over or step % self._config.validate_every == 0
        if due and self._counts.validated < step and self._ranks.leads:
            self._validate()
        if over:
            return True
        self._step(progress)
        if time.monotonic() - self._saved > self._config.save_seconds:
            self._save()
        return False

    def _step(self, progress: float) -> None:
        number, parts = self._counts.step, self._parts
        step = parts.order.step(number, whole=self._schedule.is_whole(progress))
        rate = self._schedule.rate_at(progress)
        sums = self._gradients(step)
        loss, length = float(sums[0]) / step.total, parts.optimiser.clipped()
        if not (math.isfinite(loss) and math.isfinite(length)):
            raise NotFinite(
                f"the loss of step {number} is {loss}, its gradient {length} long: a rate of "
                f"{rate:g} is too much, or there are features that are no numbers; the step was "
                "not taken"
            )
        parts.optimiser.step(rate)
        parts.average.update(number)
        self._counts = msgspec.structs.replace(self._counts, step=number + 1)
        right, seen = sums[1 : step.width], sums[step.width :]
        line = Stepped(
            step=number,
            loss=round(loss, 5),
            rate=rate,
            accuracy=tuple(round(part, 4) for part in (right / seen.clamp(min=1)).tolist()),
            tokens=int(seen.sum()),
            seconds=round(self._seconds(), 3),
        )
        if self._journal is not None:
            self._journal.write(line)
            self._report(line)

    def _gradients(self, step: Step) -> Tensor:
        """Leave the gradients of this step's loss in the network.

        Returns [1 + 2 * slots] sums over all ranks: loss, rows that were right, rows, per slot.
        """
        parts, device = self._parts, self._parts.lexicon.head.device
        picks = self._ranks.share(step.picks, lambda pick: int(pick.anchors[-1]))
        head, offset = parts.lexicon.head, None
        if step.rows is not None and step.offset is not None:
            head = head[torch.from_numpy(step.rows).to(device)]
            offset = torch.from_numpy(step.offset).to(device)
        batch = batch_of(picks, parts.lexicon, step.width)
        goal = parts.goals.of(picks, step.width, step.rows, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=head.dtype == torch.bfloat16):
            hidden = self._module(batch.features, batch.positions, batch.blocks)
        rows = hidden.flatten(0, 1)[goal.picked].to(head.dtype)
        loss, right = weighted_loss(rows, head, offset, goal.wanted)
        (loss * (self._ranks.world / step.total)).backward()
        slots = step.width - 1
        counted = [
            torch.bincount(goal.slots, weights, slots).double()
            for weights in (right.double(), None)
        ]
        return self._ranks.summed(torch.cat((loss.detach().double()[None], *counted))).cpu()

    def _validate(self) -> None:
        """Walk with the averaged weights as they would be exported, and keep the best."""
        parts, step = self._parts, self._counts.step
        weights = rounded(parts.average.weights)
        parts.walked.load_state_dict(weights)
        texts = self._texts = self._texts or [self._held(place) for place in self._places()]
        figures = walk(
            parts.walked, parts.lexicon, texts, lambda done: self._walked(done, len(texts))
        )
        length = figures.mean_acceptance_length
        best = length > self._counts.best
        if best:
            export(self._folder, parts.raw, weights)
        self._counts = msgspec.structs.replace(
            self._counts, validated=step, best=max(length, self._counts.best)
        )
        found = Validated(
            step=step,
            mean_acceptance_length=length,
            by_task=figures.by_task(),
            accepted_per_slot=figures.per_slot(parts.lexicon.width - 1),
            best=best,
        )
        if self._journal is not None:
            self._journal.write(found)
            draw(self._folder / CURVE_FILE, read_journal(self._folder / STEPS_FILE))
        self._say(found)
        if best:  # what a state says of the draft beside it stays true, whenever a kill comes
            self._save()

    def _places(self) -> list[Place]:
        """The same ones at every validation, spread over all that are held out."""
        walked, count = self._parts.corpus.walked, self._config.validate_sequences
        if not count or count >= len(walked):
            return walked
        return [walked[int(at)] for at in np.linspace(0, len(walked) - 1, count)]

    def _held(self, place: Place) -> Text:
        """What is walked of a text, with features in memory: its shard may be forgotten."""
        text = self._parts.corpus.text(place)
        stop = text.prompt + self._config.validate_tokens
        features = np.array(text.features[:stop])
        return replace(text, tokens=text.tokens[:stop], mapped=lambda: features)

    def _walked(self, done: int, total: int) -> None:
        self._endings.check()
        self._tell(Report(stage="validate", done=done, total=total, unit="answers"))

    def _report(self, line: Stepped) -> None:
        by_steps = self._schedule.steps > 0
        self._tell(
            Report(
                stage="train",
                done=self._counts.step if by_steps else int(line.seconds),
                total=self._schedule.steps if by_steps else int(self._schedule.seconds),
                unit="steps" if by_steps else "seconds",
                detail=f"step {line.step}, loss {line.loss:.3f}, slot 1 {line.accuracy[0]:.0%}",
            )
        )

    def _tell(self, report: Report) -> None:
        now = time.monotonic()
        if now - self._told >= REPORT_SECONDS or report.done == report.total:
            self._told = now
            self._say(report)

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _save(self) -> None:
        if not self._ranks.leads:
            return
        parts, counts = self._parts, msgspec.structs.replace(self._counts, seconds=self._seconds())
        tensors = {
            **{f"{WEIGHTS}.{name}": each for name, each in parts.network.named_parameters()},
            **{f"{AVERAGE}.{name}": each for name, each in parts.average.weights.items()},
            **parts.optimiser.state(),
        }
        write_state(self._folder, counts, parts.origin, tensors)
        self._saved = time.monotonic()
