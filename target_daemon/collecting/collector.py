"""The loop: asks into free slots, forwards, answers out, shards to the disk."""

import time
from typing import Final

from protocol.ending import EndingSignals
from protocol.errors import DaemonError
from protocol.training import ANSWER, CollectConfig, Report
from target_daemon.collecting.choosing import Chooser
from target_daemon.collecting.decoder import Decoder, Finished, refused
from target_daemon.collecting.lines import Asks, Out
from target_daemon.collecting.loading import Loaded
from target_daemon.collecting.shelf import Shelf

REPORT_SECONDS: Final = 1.0


class Collector:
    """Answers until the input ends, or the process is told to."""

    def __init__(
        self,
        config: CollectConfig,
        loaded: Loaded,
        chooser: Chooser,
        shelf: Shelf,
        asks: Asks,
        out: Out,
    ) -> None:
        target = loaded.target
        self._shelf, self._asks, self._out = shelf, asks, out
        self._records = loaded.records(config, features=shelf.features)
        self._decoder = Decoder(
            loaded.forwards,
            self._records,
            chooser,
            slots=loaded.slots,
            vocab_size=target.vocab_size,
            eos=target.eos_token_ids,
            likeliest=config.likeliest,
        )
        self._tokens = 0
        self._reported = time.monotonic()

    def run(self, endings: EndingSignals) -> None:
        """Answer everything. What is complete goes to the disk in any case; Ended when told so."""
        self._tell()  # that it is loaded
        try:
            while self._refill():
                for finished in self._decoder.step():
                    self._finish(finished)
                self._report()
                endings.check()
        finally:
            self._flush()

    def _refill(self) -> bool:
        """Fill the slots with what has been asked; False: every ask is answered."""
        while self._decoder.free:
            ask = self._asks.next(wait=not self._decoder.open)
            if ask is None:
                break
            try:
                self._decoder.begin(ask)
            except DaemonError as error:
                self._out.write(refused(ask, error))
        return self._decoder.open > 0

    def _finish(self, finished: Finished) -> None:
        self._tokens += len(finished.answer.tokens)
        self._out.write(finished.answer)
        if finished.example is None:
            return
        written = self._shelf.add(finished.example, finished.features)
        if written is not None:
            self._out.write(written)
            if not self._shelf.features:
                self._records.without_features()

    def _flush(self) -> None:
        written = self._shelf.flush()
        if written is not None:
            self._out.write(written)

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._reported >= REPORT_SECONDS:
            self._reported = now
            self._tell()

    def _tell(self) -> None:
        """Tokens that were answered, with those of answers that are under way."""
        under_way = self._decoder.answering
        told = f"{self._decoder.open} answers under way ({under_way:,} tokens)"
        self._out.write(Report(stage=ANSWER, done=self._tokens + under_way, detail=told))
