"""Hybrid models, adapted and native, in a real target daemon."""

import pytest
from support.drive import generate
from support.engines import guesser
from support.foreign_target import FAMILIES, own_text, write_foreign_target
from support.target_process import Link, TargetProcess, numbers
from support.targets import prompt

from protocol.status import Ready

pytest.importorskip("transformers")
# The library takes its time to be imported.
IMPORTING = 100.0
pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(150),
]

PROMPT, NEW, CHUNK, WIDTH = prompt(14, seed=3).tolist(), 16, 8, 6


NATIVE = FAMILIES["qwen3_next"] | {"model_type": "qwen3_5_text", "num_experts": None}
CASES = {
    "adapted": ("qwen3_next", "LinearAttentionLayer: a recurrent state holds no row by itself"),
    "native": (NATIVE, "the states of its last 8 rows are kept, in 16,384 bytes; a block of 8"),
}


@pytest.mark.parametrize(("family", "detail"), CASES.values(), ids=CASES)
def test_a_daemon_gives_the_librarys_text_with_and_without_proposals(family, detail, tmp_path):
    folder = write_foreign_target(tmp_path / "model", family)
    settings = {"dtype": "float32", "taps": (0, 2), "block_size": WIDTH, "prefill_chunk": CHUNK}
    with TargetProcess(folder, ring_window=64, slots=2, **settings) as daemon:
        assert daemon.wait_until_started(IMPORTING) == Ready(), daemon.log()
        with Link(daemon) as link:
            assert detail in link.hello.rollback_detail
            told = (
                f"rejected rows are undone by {link.hello.rollback}: {link.hello.rollback_detail}"
            )
            assert told in daemon.log()
            assert told in [step.detail for step in daemon.status if step != Ready()]
            plain, _, _ = generate(link, PROMPT, NEW, chunk=CHUNK, sequence=next(numbers))
            text, rounds, _ = generate(
                link,
                PROMPT,
                NEW,
                chunk=CHUNK,
                sequence=next(numbers),
                width=WIDTH,
                drafter=guesser(5, plain, PROMPT),
            )
    assert plain == own_text(folder, PROMPT, NEW)
    assert text == plain
    assert len(rounds) < NEW - 1
