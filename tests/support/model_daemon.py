"""Real daemon processes, without torch, around the model pair: ``model_daemon.py ROLE CONFIG``.

They load in a moment, and misbehave as $DFLASH_TEST_FAULTS says: words ``role:fault[:verb:n]``,
where the fault strikes at the n-th message of that verb, in the first life of
that role, or with ``:always`` at the end in every one. Faults: ``die`` (SIGKILL), ``hang``,
``refuse`` (the whole message), ``nonsense`` (wrong ids), ``garbage`` (no message at all),
``load_error``, ``load_hang``, ``exit`` (before it is loaded), ``other_taps`` (is refused).
"""

import os
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent))  # isolated: nothing else adds it

from support.model_pair import VOCAB, ModelTarget, local_token

from launch.token_ids import pack_ids
from protocol import host_facts, server
from protocol.boundary import each
from protocol.checkpoints.draft_config import read_draft_config
from protocol.daemon_main import run_draft, run_target
from protocol.errors import (
    CheckpointError,
    InsufficientMemory,
    InternalError,
    Overloaded,
    UnknownSequence,
)
from protocol.messages import (
    WIRE_VERSION,
    Close,
    Closed,
    ClosedItem,
    DraftHello,
    GpuFacts,
    Hello,
    Ingest,
    Ingested,
    IngestedItem,
    Open,
    Opened,
    OpenedItem,
    Pair,
    Paired,
    Prefill,
    Prefilled,
    Propose,
    Proposed,
    ProposedItem,
    Replay,
    Replayed,
    TargetHello,
    Verified,
    Verify,
)

FAULTS = "DFLASH_TEST_FAULTS"
LOG = "DFLASH_TEST_LOG"
CALLS = {
    Open: ("open", Opened),
    Prefill: ("prefill", Prefilled),
    Ingest: ("ingest", Ingested),
    Propose: ("propose", Proposed),
    Replay: ("replay", Replayed),
    Verify: ("verify", Verified),
    Close: ("close", Closed),
}
SLOTS, RING = 2, 80


class Target(ModelTarget):
    """A model that another process can follow, with a bounded number of slots."""

    def __init__(self):
        super().__init__(eos=-1, capacity=RING, model=local_token)

    def open(self, item):
        if len(self.tokens) >= SLOTS:
            raise Overloaded(f"{SLOTS} slots")
        return super().open(item)


class Draft:
    """Follows `local_token` from the pending token alone, and errs at every fourth position."""

    def __init__(self):
        self.open_sequences = set()

    def open(self, item):
        self.open_sequences.add(item.sequence)
        return OpenedItem(sequence=item.sequence, round=item.round, slot=item.slot)

    def ingest(self, item):
        return IngestedItem(
            sequence=item.sequence, round=item.round, start=0, stop=item.stop, seconds=0.0
        )

    def propose(self, item):
        history = [0] * item.base_pos + [item.pending]
        for _ in range(item.width - 1):
            token = local_token(history, -1)
            history.append(token % (VOCAB - 1) + 1 if len(history) % 4 == 0 else token)
        return ProposedItem(
            sequence=item.sequence,
            round=item.round,
            tokens=pack_ids(history[item.base_pos + 1 :]),
            context_rows=item.base_pos,
            draft_seconds=0.0,
            ingest_seconds=0.0,
        )

    def close(self, item):
        if item.sequence not in self.open_sequences:
            raise UnknownSequence(f"sequence {item.sequence}")
        self.open_sequences.remove(item.sequence)
        return ClosedItem(sequence=item.sequence, round=item.round, committed=0)


class Daemon:
    def __init__(self, role, config):
        self.role, self.config = role, config
        self.life = config.life
        self.engine = Target() if role == "target" else Draft()
        self.counts = {}

    def extra(self):
        return {}

    def handle(self, message):
        note(self.role, message)
        fault = self._fault(type(message).__name__.lower())
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hang":
            while True:
                time.sleep(60)
        if fault == "refuse":
            raise InternalError("refused in this test")
        if fault == "garbage":
            server.encode = lambda _: b"\xc1 no message"
        lives = {"target_life": message.target_life, "draft_life": message.draft_life}
        match message:
            case Hello():
                return self._hello(message, lives)
            case Pair():
                return Paired(transport="shm", mapped_bytes=0, seconds=0.0, **lives)
            case _:
                call, kind = CALLS[type(message)]
                results = each(message.items, getattr(self.engine, call))
                if fault == "nonsense":
                    results = tuple(spoiled(result) for result in results)
                return kind(results=results, **lives)

    def _fault(self, verb):
        self.counts[verb] = self.counts.get(verb, 0) + 1
        for role, fault, *when in faults():
            strikes = self.config.life <= 2 or when[2:] == ["always"]
            if strikes and role == self.role and when[:2] == [verb, str(self.counts[verb])]:
                return fault
        return ""

    def _facts(self):
        if self.config.device == "cpu":
            return host_facts.gather("cpu", 1, self.config.listen)
        uuid = f"GPU-{self.config.device}"
        gpu = GpuFacts(uuid=uuid, name="model", driver="13.0", mig=False, mps=False)
        return host_facts.gather(f"cuda:{uuid}", 1, gpu=gpu)

    def _hello(self, hello, lives):
        if lives[f"{self.role}_life"] != self.life:  # a service's new life
            self.life = lives[f"{self.role}_life"]
            self.engine = Target() if self.role == "target" else Draft()
        common = {
            "wire_version": WIRE_VERSION + (self._fault("version") == "wrong"),
            "nonce": hello.nonce,
            "host": self._facts(),
            "dtype": "float32",
            "hidden_size": 32,
            "vocab_size": VOCAB,
            "slots": self.config.slots,
            "load_seconds": 0.0,
            "weight_bytes": 0,
        }
        if self.role == "draft":
            folder = Path(self.config.draft)
            known = (folder / "config.json").is_file()
            taps = read_draft_config(folder).target_layer_ids if known else (0, 2, 3)
            if self._fault("taps") == "wrong":
                taps = (0, 1, 3)
            return DraftHello(
                network="model",
                target_layer_ids=taps,
                mask_token_id=3,
                block_size=6,
                sample_from_anchor=False,
                context_window=self.config.context_window,
                **common,
                **lives,
            )
        return TargetHello(
            model_type="model",
            num_layers=4,
            padded_vocab_size=VOCAB,
            max_positions=512,
            taps=self.config.taps,
            mask_token_id=self.config.mask_token_id,
            eos_token_ids=(),
            embedding_scale=1.0,
            logit_scale=1.0,
            logit_softcap=0.0,
            tied_embeddings=True,
            rope_theta=1.0,
            ring_capacity=RING,
            ring_window=RING - 16,
            prefill_chunk=16,
            max_width=max(1, self.config.block_size),
            exact="native",
            exact_detail="",
            rollback="fast",
            **common,
            **lives,
        )


def note(role, message):
    """Append to $DFLASH_TEST_LOG what is handled, one line for each sequence."""
    path = os.environ.get(LOG)
    for item in getattr(message, "items", ()) if path else ():
        with Path(path).open("a", encoding="ascii") as log:
            log.write(f"{role} {type(message).__name__} {item.sequence}\n")


def spoiled(result):
    if isinstance(result, ProposedItem):
        return msgspec.structs.replace(result, tokens=pack_ids([VOCAB]))
    return msgspec.structs.replace(result, committed=result.committed + 1)


def faults():
    return [word.split(":") for word in os.environ.get(FAULTS, "").split()]


def build_for(role):
    @contextmanager
    def build(config, progress):
        mine = [fault for owner, fault, *_ in faults() if owner == role]
        progress(1, 2)
        if "load_error" in mine:
            raise CheckpointError(f"no tensor `x` in the {role}")
        if "other_taps" in mine and config.taps != (0, 2, 3):
            raise InsufficientMemory("no room for these taps")
        if "exit" in mine:
            os._exit(9)
        while "load_hang" in mine:
            time.sleep(60)
        progress(2, 2)
        yield Daemon(role, config)

    return build


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    sys.exit((run_draft if role == "draft" else run_target)(arguments, build_for(role)))
