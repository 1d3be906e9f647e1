"""Hybrid, windowed and expert models: speculation gives their own text, and leaves their state."""

import random
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from support import proven_targets as proven
from support.drive import pack, prefill, unpack
from support.foreign_target import write_foreign_target
from support.targets import load, prompt

from protocol.messages import OpenItem, Sampling, VerifyItem
from target_daemon.checks import Limits
from target_daemon.engine import Engine

pytest.importorskip("transformers")
# That library warns; the texts are long.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]

NEW, WIDTH, CHUNK = 300, 8, 16
PROMPT = prompt(14, seed=3).tolist()
SAMPLINGS = {"greedy": Sampling(), "seeded": Sampling(temperature=0.8, top_k=40, seed=13)}
NEAR = {"atol": 2e-4, "rtol": 1e-4}
SETTINGS = {
    "taps": (0,),
    "block_size": WIDTH,
    "prefill_chunk": 256,
    "ring_window": 64,
}
# A state that sums all rows up holds none by itself, and the library keeps none of before.
RECURRENT = {"bamba", "falcon_h1", "qwen3_5", "qwen3_next"}
NAMES = sorted([*proven.FAMILIES, f"qwen3_5{proven.NATIVE}"])
WAYS = [
    (family, way)
    for family in NAMES
    for way in (("replay", "failing") if family in RECURRENT else ("fast", "replay", "failing"))
]
each_way = pytest.mark.parametrize(("case", "way"), WAYS, indirect=True)
each_family = pytest.mark.parametrize("case", NAMES, indirect=True)


@dataclass
class Case:
    """One checkpoint, its target, and the texts that its library makes of it."""

    family: str
    folder: object
    target: object
    state: object
    texts: dict = field(default_factory=dict)

    def text(self, name):
        if name not in self.texts:
            self.texts[name] = proven.own_text(self.folder, PROMPT, NEW, SAMPLINGS[name])
        return self.texts[name]


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Gives the case of a family, which is made once."""
    place = tmp_path_factory.mktemp("proven")

    @cache
    def make(family):
        name = family.removesuffix(proven.NATIVE)
        folder = write_foreign_target(place / family, proven.FAMILIES[name])
        if name != family:
            return Case(family, folder, load(folder, **SETTINGS), proven.native_state)
        return Case(family, folder, proven.load_adapted(folder, **SETTINGS), proven.adapted_state)

    return make


@pytest.fixture
def case(request, cases):
    return cases(request.param)


class Drafter:
    """Right at first, then wrong, then right for a random number of tokens each round."""

    def __init__(self, text, wrong, mixed):
        self._text, self._wrong, self._mixed = text, wrong, mixed
        self._random = random.Random(5)

    def __call__(self, done, wanted):
        right = self._random.randint(0, wanted)
        if done < self._mixed:
            right = wanted if done < self._wrong else 0
        tokens = self._text[done : done + wanted]
        return [t if i < right else (t + 1) % 97 for i, t in enumerate(tokens)]


def speculate(case, name, way, drafter, each_round=lambda _committed: None, count=NEW):
    """The text, and the verdict of each round; `each_round` sees the ids that have state."""
    target = case.target
    engine = Engine(target, Limits(CHUNK, WIDTH, "replay" if way == "replay" else "fast"))
    engine.open(OpenItem(sequence=1, sampling=SAMPLINGS[name]))
    got, verdicts = [prefill(engine, 1, PROMPT, CHUNK).token], []
    while len(got) < count:
        ids = [got[-1], *drafter(len(got), min(WIDTH, count - len(got)) - 1)]
        base = len(PROMPT) + len(got) - 1
        item = VerifyItem(
            sequence=1,
            round=len(verdicts) + 1,
            base_pos=base,
            tokens=pack(ids),
            budget=count - len(got),
        )
        verdicts.append(engine.verify(item))
        got += unpack(verdicts[-1].tokens)
        each_round([*PROMPT, *got][: verdicts[-1].committed])
    return got, verdicts


@pytest.fixture
def way(request, case, monkeypatch):
    """A way back; "failing" leaves it half done and raises, every second time.

    Or each time, and with nothing left, where a model that allows no fast one is taken to do so.
    """
    if request.param == "failing" and case.family in RECURRENT:

        def lose(slot, _base_pos, _n):
            case.target.caches.reset(slot)
            raise RuntimeError("a fault of the test")

        monkeypatch.setattr(type(case.target), "supports_fast_rollback", True)
        monkeypatch.setattr(case.target, "rollback_to", lose)
    elif request.param == "failing":
        whole, calls = case.target.rollback_to, []

        def half(slot, base_pos, n):
            calls.append(n)
            if len(calls) % 2:
                return whole(slot, base_pos, n)
            whole(slot, base_pos, max(1, n - 1))
            raise RuntimeError("a fault of the test")

        monkeypatch.setattr(case.target, "rollback_to", half)
    return request.param


@each_way
@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_text_is_the_models_own_whatever_was_drafted(case, way, name):
    text, verdicts = speculate(case, name, way, Drafter(case.text(name), 180, 190))
    assert text == case.text(name)
    assert len(set(text)) > 3
    lengths = {len(verdict.tokens) // 4 for verdict in verdicts}
    assert lengths == set(range(1, WIDTH + 1))
    used = {verdict.rollback for verdict in verdicts} - {"none"}
    half = {"replay"} if case.family in RECURRENT else {"fast", "replay"}
    assert used == (half if way == "failing" else {way})


@each_way
def test_the_state_after_each_round_is_that_of_a_fresh_prefill(case, way):
    def check(ids):
        proven.same_as_fresh(case.target, case.state, ids, NEAR)

    count = 3 * proven.WINDOW + 3 * WIDTH
    drafter = Drafter(case.text("seeded"), WIDTH, WIDTH + 2)
    _, verdicts = speculate(case, "seeded", way, drafter, check, count)
    assert len({len(verdict.tokens) for verdict in verdicts}) > 4


@each_family
def test_a_prompt_in_chunks_leaves_the_state_of_the_whole(case):
    ids = prompt(3 * proven.WINDOW + 20, seed=8)
    target = case.target
    target.reset(0)
    for start in range(0, len(ids), 7):
        last = target.verify_batch(0, ids[start : start + 7], start, "last")
    proven.same_as_fresh(target, case.state, ids.tolist(), NEAR)
    whole = target.verify_batch(1, ids, 0, "last")
    torch.testing.assert_close(last, whole, **NEAR)


@each_family
def test_which_ways_a_model_allows_is_found_at_load_and_why(case):
    target = case.target
    assert target.supports_fast_rollback == (case.family not in RECURRENT)
    recurrent = "a recurrent state holds no row by itself"
    dropped = "tried at load: rejected rows can be cut off"
    if case.family.endswith(proven.NATIVE):
        dropped = "the states of its last 8 rows are kept, in 8,192 bytes"
    assert (recurrent if case.family in RECURRENT else dropped) in target.rollback_detail
    assert not getattr(target, "stepwise", False)
