"""Collecting over tiny targets, in this process: what is asked, and what comes of it."""

import torch

from protocol.messages import Sampling
from protocol.training import Ask, CollectConfig, Kept
from target_daemon.collecting.decoder import Decoder
from target_daemon.collecting.loading import load

TAPS = (0, 2, 3)


def loaded(model, folder="", **settings):
    """A target that is ready to answer, and its config."""
    defaults = {"slots": 3, "max_positions": 96, "likeliest": 5, "taps": TAPS, "threads": 1}
    config = CollectConfig(model=str(model), folder=str(folder), **(defaults | settings))
    threads = torch.get_num_threads()
    try:
        return load(config, lambda *_: None), config
    finally:
        torch.set_num_threads(threads)


def decoder(ready, config, *, features=True):
    target = ready.target
    return Decoder(
        ready.forwards,
        ready.records(config, features=features),
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
