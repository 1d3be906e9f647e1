"""Kept prefixes of targets whose state cannot be cut, with a real draft over their feature rows."""

import pytest
from support import proven_targets as proven
from support.foreign_target import FAMILIES, write_foreign_target
from support.kept_pair import LONG
from support.real_pair import Checkpoints, real_pair
from support.tiny_pair import write_pair

from protocol.messages import Sampling

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # that library's own

CHUNK, TOKENS = 16, 20
LAYER_TYPES = proven.DELTA["layer_types"]
SETTINGS = {
    "prefill_chunk": CHUNK,
    "ring_window": 24,
    "slots": 2,
    "max_positions": 200,
    "dtype": "float32",
    "exact": False,
    "threads": 1,
    "context": 24,
}
ENDLESS = {"speculative": True, "sampling": Sampling(ignore_eos=True)}


DEEP = {"num_hidden_layers": 4}  # as many as the draft knows
SETTINGS_OF = {
    "qwen3_5": proven.FAMILIES["qwen3_5"] | DEEP | {"layer_types": LAYER_TYPES * 2},  # a native one
    "qwen3_next": FAMILIES["qwen3_next"],
    "falcon_h1": proven.FAMILIES["falcon_h1"] | DEEP,
    "lfm2": FAMILIES["lfm2"],
    "mamba": FAMILIES["mamba"],
}
CASES = [
    ("qwen3_5", "slot"),
    ("qwen3_5", "memory"),
    ("qwen3_5", "disk"),
    ("qwen3_next", "disk"),
    ("falcon_h1", "memory"),
    ("lfm2", "slot"),
    ("mamba", "disk"),
]


@pytest.mark.parametrize(("family", "where"), CASES)
def test_text_rounds_and_proposals_after_a_hit_are_those_of_a_cold_run(family, where, tmp_path):
    """At the end of the first text, and before the last chunk of its prompt: nowhere else."""
    target = write_foreign_target(tmp_path / "target", SETTINGS_OF[family])
    checkpoints = Checkpoints(target, write_pair(tmp_path / "pair")[1])
    room = {"prefix_bytes": 1 << 24, "store": tmp_path / "store" if where == "disk" else None}
    with real_pair(checkpoints, **SETTINGS, **room) as pair:
        first = pair.run(LONG[:50], 12, **ENDLESS, retain=True)
        turn, again = [*LONG[:50], *first.token_ids, *LONG[60:70]], [*LONG[:49], 9, 9]
        cold = [pair.run(ids, TOKENS, **ENDLESS) for ids in (turn, again)]
        if where == "slot":
            pair.run(LONG[:50], 12, **ENDLESS, retain=True)
        if where == "memory":
            for other in ([7] * 20, [8] * 20):
                pair.run(other, 1, **ENDLESS, retain=True)
        pair.engine.kept.save_all(60)
        if where != "disk":
            check(pair, (turn, again), cold)
    if where == "disk":
        with real_pair(checkpoints, **SETTINGS, **room) as pair:
            check(pair, (turn, again), cold)


def check(pair, texts, cold):
    kept = []
    for ids, whole in zip(texts, cold, strict=True):
        # Some proposals are right, so that blocks of several lengths are kept.
        hints = {at: token for at, token in enumerate(whole.token_ids) if at % 5 < 3}
        plain = pair.run(ids, TOKENS, **ENDLESS, base_pos=len(ids))
        helped = pair.run(ids, TOKENS, **ENDLESS, base_pos=len(ids), hint_tokens=hints)
        assert (plain.token_ids, plain.rounds, plain.proposed) == (
            whole.token_ids,
            whole.rounds,
            whole.proposed,
        )
        assert helped.token_ids == whole.token_ids
        assert max(helped.rounds) > 1
        kept.append(plain.kept)
    assert kept == [61, 50 - 50 % CHUNK]
