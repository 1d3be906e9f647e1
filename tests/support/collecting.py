"""Collecting over tiny targets, in this process: what is asked, and what comes of it."""

import msgspec
import torch
from support.targets import prompt

from protocol.checkpoints.shards import read_shard, shard_numbers
from protocol.config import write_config
from protocol.messages import Sampling
from protocol.training import Ask, CollectConfig, CollectLine, Kept
from target_daemon.collecting.__main__ import main
from target_daemon.collecting.choosing import Chooser
from target_daemon.collecting.decoder import Decoder
from target_daemon.collecting.loading import load

TAPS = (0, 2, 3)
WIDTH = 2 * 3 * 24  # bytes of a row of features
FULL = {"shard_tokens": 60, "feature_bytes": 1 << 20}
DEFAULTS = {"slots": 3, "max_positions": 96, "likeliest": 5, "taps": TAPS, "threads": 1}
DEFAULTS |= {"dtype": "float32"}  # on any processor, for what is compared by numbers


def run(place, model, folder, asks=b"", *arguments, **settings):
    """The whole of the process, in this one: what it says, and its exit code."""
    config = CollectConfig(model=str(model), folder=str(folder), **(DEFAULTS | settings))
    path = place / f"config-{len(list(place.glob('config-*')))}.json"
    write_config(config, path)
    said, threads = place / "said", torch.get_num_threads()
    lines = asks if isinstance(asks, bytes) else encoded(asks)
    (place / "asked").write_bytes(lines)
    try:
        with (place / "asked").open("rb") as stdin, said.open("wb") as stdout:
            code = main([str(path), *arguments], stdin.fileno(), stdout.fileno())
    finally:
        torch.set_num_threads(threads)
    return code, decoded(said.read_bytes())


def decoded(data):
    return [msgspec.json.decode(line, type=CollectLine) for line in data.splitlines()]


def encoded(asks):
    return b"".join(msgspec.json.encode(each) + b"\n" for each in asks)


def of(kind, lines):
    return [line for line in lines if isinstance(line, kind)]


def loaded(model, folder="", **settings):
    """A target that is ready to answer, and its config."""
    config = CollectConfig(model=str(model), folder=str(folder), **(DEFAULTS | settings))
    threads = torch.get_num_threads()
    try:
        return load(config, lambda *_: None), config
    finally:
        torch.set_num_threads(threads)


def decoder(ready, config, *, features=True, chooser=None):
    target = ready.target
    return Decoder(
        ready.forwards,
        ready.records(config, features=features),
        chooser or Chooser(1),
        slots=ready.slots,
        vocab_size=target.vocab_size,
        eos=target.eos_token_ids,
        likeliest=config.likeliest,
    )


def ask(number, tokens, *, most=20, task="t", keep=True, **sampling):
    ids = tuple(int(token) for token in tokens)
    kept = Kept(task=task, held_out=number % 2 == 1) if keep else None
    return Ask(id=number, tokens=ids, max_tokens=most, sampling=Sampling(**sampling), kept=kept)


def answer_all(decoding, asks):
    """Everything that is asked, in the order in which it is answered."""
    waiting, found = list(asks), []
    while waiting or decoding.open:
        while waiting and decoding.free:
            decoding.begin(waiting.pop(0))
        found += decoding.step()
    return found


def many_asks(first, count, **settings):
    return [
        ask(n, prompt(4 + n % 5, seed=n), most=12, ignore_eos=True, **settings)
        for n in range(first, first + count)
    ]


def sequences(folder):
    """Id -> tokens of all sequences in the shards of `folder`."""
    found = {}
    for number in shard_numbers(folder):
        shard = read_shard(folder, number, vocab=97)
        for at in range(shard.sequences):
            found[int(shard.ids[at])] = shard.tokens[shard.rows(at)].tolist()
    return found
