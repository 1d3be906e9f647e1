"""A model that only `transformers` knows, in a real target daemon."""

import pytest
from support.drive import generate
from support.engines import guesser
from support.foreign_target import own_text, write_foreign_target
from support.target_process import Link, TargetProcess, numbers
from support.targets import prompt

from protocol.status import Ready

pytest.importorskip("transformers")
pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore")]

PROMPT, NEW, CHUNK, WIDTH = prompt(14, seed=3).tolist(), 16, 8, 6


def test_a_daemon_gives_the_librarys_text_with_and_without_proposals(tmp_path):
    folder = write_foreign_target(tmp_path / "model", "qwen3_next")
    settings = {"dtype": "float32", "taps": (0, 2), "block_size": WIDTH, "prefill_chunk": CHUNK}
    with TargetProcess(folder, ring_window=64, slots=2, **settings) as daemon:
        assert daemon.wait_until_started() == Ready(), daemon.log()
        with Link(daemon) as link:
            assert (link.hello.rollback, link.hello.vocab_size) == ("replay", 97)
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
