"""Stands in for the two children of `dflashd train`, as quickly as lines can go. Run as a script.

``train_child.py MANNER CONFIG``: answers are made-up words, and shards are real ones. MANNER says
what happens after some answers, or is ``well``.
"""

import os
import random
import signal
import sys
from pathlib import Path

import msgspec
import numpy as np

from protocol.checkpoints.shards import Example, join, shard_numbers, write_shard
from protocol.config import read_config
from protocol.training import (
    ANSWER,
    STEPS_FILE,
    Answered,
    Ask,
    CollectConfig,
    Problem,
    Report,
    TrainConfig,
    Trained,
    Validated,
    Written,
)

WORDS = ("one", "two", "three", "river", "stone", "cloud", "seven", "bird", "glass", "winter")
SEQUENCES = 8  # a shard
COMMAND = (sys.executable, str(Path(__file__).resolve()))


def say(line):
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


def made_up(ask):
    """Ids of printable characters, as `support.tiny_text` numbers them."""
    chance = random.Random(ask.sampling.seed)
    text = " ".join(chance.choice(WORDS) for _ in range(chance.randint(9, 14)))
    return [ord(character) - 31 for character in text][: ask.max_tokens]


def example(ask, answer):
    tokens = np.array([*ask.tokens, *answer], np.int32)
    top = np.zeros((len(tokens), 2), np.int32)
    return Example(
        id=ask.id,
        task=ask.kept.task,
        held_out=ask.kept.held_out,
        temperature=ask.sampling.temperature,
        prompt=len(ask.tokens),
        tokens=tokens,
        top_ids=top,
        top_logprobs=top.astype(np.float16),
    )


class Shelf:
    def __init__(self, folder):
        self.folder, self.waiting = folder, []
        self.number = len(shard_numbers(folder))
        self.tokens = 0

    def flush(self):
        if self.waiting:
            write_shard(self.folder, self.number, join(self.waiting))
            ids = tuple(each.id for each in self.waiting)
            self.tokens += sum(len(each.tokens) for each in self.waiting)
            say(Written(shard=self.number, ids=ids, tokens=self.tokens, features=False))
            self.number, self.waiting = self.number + 1, []


def collect(manner, config):
    shelf = Shelf(Path(config.folder))
    say(Report(stage="load", done=1, total=1))
    say(Report(stage=ANSWER, done=0))

    def end(*_):
        shelf.flush()
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    for line in sys.stdin:
        ask = msgspec.json.decode(line, type=Ask)
        if manner == "refuse":
            say(Answered(id=ask.id, tokens=(), finish_reason="refused", detail="no room"))
            continue
        answer = made_up(ask)
        if ask.kept is not None:
            shelf.waiting.append(example(ask, answer))
        say(Answered(id=ask.id, tokens=tuple(answer), finish_reason="stop"))
        if len(shelf.waiting) == SEQUENCES:
            shelf.flush()
            misbehave(manner)
    end()


def train(manner, config):
    folder = Path(config.folder)
    say(Report(stage="load", done=0, total=1))
    misbehave("loading" if manner == "unfit" else "")
    say(Report(stage="load", done=1, total=1))
    held = {"task": 1.5}
    with (folder / STEPS_FILE).open("a") as file:
        for step in (1, 2):
            say(Report(stage="train", done=step, total=2, detail="loss 1"))
            file.write(f'{{"type":"Stepped","step":{step},"loss":1.25,"accuracy":[0.5]}}\n')
            told = Validated(
                step=step,
                mean_acceptance_length=1.0 + step / 4,
                by_task=held,
                accepted_per_slot=(0.5, 0.25),
                best=True,
            )
            say(told)
            file.write(msgspec.json.encode(told).decode() + "\n")
            file.flush()
            misbehave(manner)
    say(Trained(steps=2, seconds=1.0, tokens=1000, passes=0.5))


def misbehave(manner):
    match manner:
        case "die":
            sys.stderr.write("about to die\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        case "interrupt":
            say(Report(stage=ANSWER, done=30, detail="4 answers under way (30 tokens)"))
            os.kill(os.getppid(), signal.SIGINT)
            signal.pause()
        case "problem":
            say(Problem(code="insufficient_memory", detail="12 MB are needed, 3 MB are there"))
            sys.exit(75)
        case "loading":
            say(Problem(code="config", detail="these data will not do"))
            sys.exit(78)
        case "defect":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what it says last is why it failed
            sys.stderr.write("KeyError: 'lost'\n")
            sys.stderr.flush()
            say(Problem(code="internal", detail="it failed; the daemon's log says why"))
            sys.exit(70)
        case "nonsense":
            print('{"type":"Answered","id":-4}', flush=True)
            signal.pause()
        case "silence":
            signal.pause()
        case "print":
            print("a library prints this", flush=True)
        case "leave":
            sys.exit(0)


def main(manner, path):
    keys = msgspec.json.decode(Path(path).read_bytes())
    if "mask_token_id" in keys:
        train(manner, read_config(TrainConfig, Path(path)))
    else:
        collect(manner, read_config(CollectConfig, Path(path)))


if __name__ == "__main__":
    main(*sys.argv[1:])
