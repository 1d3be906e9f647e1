"""A draft is tried on a fixed prompt when it is paired: what both daemons do for that."""

import pytest
import torch
from support.drive import prefill, unpack
from support.kept_pair import LONG, PIECE, kept_pair
from support.plain_host import PlainHost
from support.targets import features, load
from support.tiny_target import write_tiny_target

from draft_daemon.golden import NOT_COMPARED, Agreement, compare
from launch.events import DraftFacts
from launch.meeting import doubt
from protocol.errors import DraftMismatch
from protocol.messages import CloseItem, OpenItem, Paired, ProposeItem
from protocol.transports.base import GOLDEN_IDS, GOLDEN_ROWS
from target_daemon.golden import publish

IDS = tuple(LONG[:20])
PLACES = range(8, 20)


def test_the_target_shares_its_choices_and_feature_rows(tmp_path):
    host = PlainHost()
    target = load(write_tiny_target(tmp_path, "llama2"), host, prefill_chunk=8)
    publish(target, host, (*IDS[:6], 96, 97, *IDS[6:]))  # 97 is none of its ids
    ids = [*IDS[:6], 96, *IDS[6:]]
    shared = host.weights
    assert shared[GOLDEN_IDS][0].tolist() == ids
    best = target.verify_batch(0, torch.tensor(ids), 0, "all").argmax(dim=-1)
    assert torch.equal(shared[GOLDEN_IDS][1], best)
    torch.testing.assert_close(shared[GOLDEN_ROWS], features(target, 0, 0, len(ids)))


@pytest.mark.parametrize(("ids", "taps"), [((), (0, 2)), (IDS, ())])
def test_without_a_prompt_or_a_draft_nothing_is_shared(tmp_path, ids, taps):
    host = PlainHost()
    target = load(write_tiny_target(tmp_path, "llama2"), host, taps=taps)
    publish(target, host, ids)
    assert GOLDEN_IDS not in host.weights


def test_the_drafts_first_tokens_are_those_of_its_rounds(tmp_path):
    with kept_pair(tmp_path / "pair") as pair:
        pair.engine.open(OpenItem(sequence=1))
        prefill(pair.engine, 1, list(IDS), PIECE)
        pair.draft.open(OpenItem(sequence=1, slot=0))
        expected = []
        for base in PLACES:
            item = ProposeItem(sequence=1, base_pos=base, pending=IDS[base], width=2)
            expected += unpack(pair.draft.propose(item).tokens)
        pair.draft.close(CloseItem(sequence=1))
        rows = pair.target.ring.rows[0, : len(IDS)]
        assert list(pair.draft.first_tokens(rows, torch.tensor(IDS), PLACES)) == expected


def shared(count=20, width=6):
    ids = torch.stack((torch.arange(count), torch.arange(count) % 4))
    return {GOLDEN_IDS: ids, GOLDEN_ROWS: torch.zeros(count, width)}


def test_agreement_is_counted_behind_the_first_positions():
    found = compare(shared(), 6, lambda _rows, _ids, places: tuple(0 for _ in places), window=20)
    assert found == Agreement(3, 12)


@pytest.mark.parametrize("weights", [{}, {"embed": torch.zeros(2)}, shared(count=8)])
def test_what_is_not_shared_or_too_short_is_not_compared(weights):
    assert compare(weights, 6, pytest.fail, window=20) == NOT_COMPARED


def test_a_draft_that_keeps_less_context_than_the_prompt_has_is_not_called_a_wrong_one():
    assert compare(shared(), 6, pytest.fail, window=19) == NOT_COMPARED


@pytest.mark.parametrize(
    "weights", [shared(width=7), shared() | {GOLDEN_IDS: torch.zeros(20, dtype=torch.int64)}]
)
def test_another_shape_is_a_mismatch(weights):
    with pytest.raises(DraftMismatch, match="rows of 6 were expected"):
        compare(weights, 6, pytest.fail, window=20)


@pytest.mark.parametrize(
    ("agreed", "compared", "wrong"),
    [(0, 0, False), (0, 24, True), (1, 24, True), (2, 24, False), (1, 20, False)],
)
def test_less_than_a_twentieth_is_called_a_wrong_pair(agreed, compared, wrong):
    paired = Paired(
        target_life=1,
        transport="shm",
        mapped_bytes=1,
        seconds=0.1,
        agreed=agreed,
        compared=compared,
    )
    said = doubt(paired)
    assert said.startswith("wrong pair: ") == wrong
    assert bool(said) == wrong
    assert DraftFacts(1, 8, 64, said).doubt == said
