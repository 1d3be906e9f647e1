"""Engines over the toy targets, and the items and drafters that tests drive them with."""

import random

from support.drive import pack, prefill
from support.toy_target import AttentionTarget

from protocol.messages import OpenItem, PrefillItem, Sampling, VerifyItem
from target_daemon.checks import Limits
from target_daemon.engine import Engine

PROMPT = [1, 5, 9, 2, 7, 33, 20, 4, 4, 8]
END = len(PROMPT)
CHUNK, WIDTH = 4, 6


def engine_over(target, *, rollback="fast", ring=None):
    return Engine(target, Limits(CHUNK, WIDTH, rollback), ring)


def oracle(text, prompt, *, right):
    """A drafter that knows the text and proposes `right` of its tokens before a wrong one."""

    def draft(so_far, wanted):
        done = len(so_far) - len(prompt)
        tokens = (text[done : done + wanted] + [0] * wanted)[:wanted]
        return [t if i < right else (t + 1) % 40 for i, t in enumerate(tokens)]

    return draft


def guesser(seed, text, prompt):
    """A drafter that is right about three times in four, at random places."""
    source = random.Random(seed)

    def draft(so_far, wanted):
        done = len(so_far) - len(prompt)
        tokens = (text[done : done + wanted] + [0] * wanted)[:wanted]
        return [t if source.random() < 0.75 else source.randrange(40) for t in tokens]

    return draft


def ready(target=None, *, sequence=1, sampling=None, **options):
    """An engine with one prefilled sequence; returns (engine, target, first token)."""
    target = target or AttentionTarget()
    engine = engine_over(target, **options)
    engine.open(OpenItem(sequence=sequence, sampling=sampling or Sampling()))
    return engine, target, prefill(engine, sequence, PROMPT, CHUNK).token


def block(ids, *, base=END, number=1, budget=50, sequence=1):
    return VerifyItem(
        sequence=sequence, round=number, base_pos=base, tokens=pack(ids), budget=budget
    )


def chunk(start, ids, *, last=False, sequence=1):
    return PrefillItem(sequence=sequence, start=start, tokens=pack(ids), last=last)


def opened(**options):
    target = AttentionTarget(**options)
    engine = engine_over(target)
    engine.open(OpenItem(sequence=1))
    return engine, target
