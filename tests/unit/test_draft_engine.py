"""The draft engine over a real ring in one process: ingest, propose, close, and refusals."""

from pathlib import Path

import pytest
import torch
from support.draft_bench import Bench
from support.drive import unpack
from support.tiny_draft import (
    HEADS,
    SPECULATORS,
    Z_LAB,
    embedding,
    head,
    merged,
    uniform,
    write_draft,
)

from draft_daemon.checkpoint import load_draft
from draft_daemon.daemon import load_daemon
from draft_daemon.engine import Engine
from draft_daemon.models.dflash import DFlash
from protocol.boundary import each
from protocol.config import DraftConfig
from protocol.errors import (
    DraftMismatch,
    FeatureExpired,
    Overloaded,
    PositionMismatch,
    ProtocolError,
    UnknownSequence,
    UnsupportedModel,
    UsageError,
)
from protocol.messages import CloseItem, IngestItem, OpenItem, ProposeItem

HOT = (0.0, 2.0, 5.0, 10.0)


@pytest.fixture
def bench(tmp_path):
    with Bench(tmp_path) as made:
        yield made


def test_a_block_is_the_networks_best_ids(bench):
    features = bench.sequence()
    features.write(0, 20)
    assert bench.tokens(20) == bench.expected(features, 20)
    assert len(set(bench.tokens(20))) > 1


@pytest.mark.parametrize("width", [2, 3, 4, 5, 6])
def test_every_width_up_to_the_block_answers_one_token_less(bench, width):
    features = bench.sequence()
    features.write(0, 9)
    assert bench.tokens(9, width=width) == bench.expected(features, 9, width=width)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_of_the_drafts_own_walks_from_the_pending_token(tmp_path, name):
    with Bench(tmp_path, HEADS[name]) as bench:
        features = bench.sequence()
        features.write(0, 20)
        config, engine = bench.draft.config, bench.engine
        whole = config.max_proposals + 1
        tokens = bench.tokens(20, width=whole)
        assert len(tokens) == config.max_proposals
        answer = bench.propose(20, width=whole, top_k=3)
        assert unpack(answer.tokens) == unpack(answer.top_ids)[::3] == tokens
        assert len(answer.top_logprobs) == 3 * len(tokens)
        assert len(answer.confidences) == len(tokens)
        chain = bench.propose(20, width=whole).confidences
        assert answer.confidences == pytest.approx(chain, rel=1e-4)
        others = {tuple(bench.tokens(20, pending=at, width=whole)) for at in range(6)}
        assert len(others) == 6
        drawn = {tuple(bench.tokens(20, width=whole, temperatures=(t,) * len(tokens))) for t in HOT}
        assert tuple(tokens) in drawn
        assert len(drawn) > 1
        # As at pairing: each place by itself, in the order of the places.
        ids = torch.arange(30) % config.vocab_size
        first = engine.first_tokens(features.rows[:30], ids, range(8, 30))
        again = bench.sequence(2, slot=1)
        again.rows[:30] = features.rows[:30]
        again.write(0, 30)
        alone = [bench.tokens(at, at, 2, 2) for at in range(8, 30)]
        assert [[token] for token in first] == alone


def test_a_wider_block_than_trained_is_refused(bench):
    bench.sequence().write(0, 9)
    with pytest.raises(UsageError, match="6 tokens wanted; a block of this draft proposes 5"):
        bench.propose(9, width=7)


def test_proposing_again_at_one_position_gives_the_same_tokens(bench):
    features = bench.sequence()
    features.write(0, 12)
    first = bench.tokens(12)
    assert bench.tokens(12, pending=8) == bench.expected(features, 12, pending=8)
    assert bench.tokens(12) == first


def test_rounds_are_the_same_as_one_ingest_of_everything(bench):
    features, base = bench.sequence(), 30
    features.write(0, base)
    bench.engine.ingest(IngestItem(sequence=1, stop=17))
    for kept in (1, 3, 6, 2):
        assert bench.tokens(base) == bench.expected(features, base)
        features.write(base, base + 6)
        base += kept
    assert bench.propose(base).context_rows == base


def test_ingest_answers_what_became_context(bench):
    bench.sequence().write(0, 40)
    first = bench.engine.ingest(IngestItem(sequence=1, round=3, stop=30))
    assert (first.round, first.start, first.stop) == (3, 0, 30)
    second = bench.engine.ingest(IngestItem(sequence=1, stop=40))
    assert (second.start, second.stop) == (30, 40)
    again = bench.engine.ingest(IngestItem(sequence=1, stop=40))
    assert (again.start, again.stop) == (40, 40)
    assert first.seconds > 0


def test_ingest_cannot_go_back(bench):
    bench.sequence().write(0, 10)
    bench.propose(10)
    with pytest.raises(PositionMismatch, match="up to 10 are context already; 9"):
        bench.engine.ingest(IngestItem(sequence=1, stop=9))
    with pytest.raises(PositionMismatch):
        bench.propose(9)


@pytest.mark.parametrize("part", ["project_context", "block"])
def test_an_allocation_that_fails_is_said_and_the_next_round_is_as_if_it_had_not(
    bench, monkeypatch, part
):
    features = bench.sequence()
    features.write(0, 20)
    own = getattr(DFlash, part)

    def starved(self, *arguments):
        own(self, *arguments)
        return torch.empty(1 << 62, dtype=torch.uint8)

    item = ProposeItem(sequence=1, round=2, base_pos=20, pending=7, width=6)
    with monkeypatch.context() as patched:
        patched.setattr(DFlash, part, starved)
        (failed,) = each((item,), bench.engine.propose)
    assert failed.code == "out_of_memory"
    assert bench.tokens(20) == bench.expected(features, 20)


def test_rows_that_the_target_overwrote_are_a_gap(tmp_path):
    with Bench(tmp_path, capacity=20) as bench:
        features = bench.sequence()
        features.write(0, 10)
        bench.engine.ingest(IngestItem(sequence=1, stop=10))
        features.write(10, 50)
        done = bench.engine.ingest(IngestItem(sequence=1, stop=50))
        assert (done.start, done.stop) == (30, 50)
        assert bench.tokens(50) == bench.expected(features, 50, skip=range(10, 30))
        assert bench.propose(50).context_rows == 30


def test_a_prompt_longer_than_the_context_is_read_from_its_window_on(tmp_path):
    with Bench(tmp_path, context_window=16) as bench:
        features = bench.sequence()
        features.write(0, 100)
        assert bench.engine.ingest(IngestItem(sequence=1, stop=100)).start == 84
        assert bench.tokens(100) == bench.expected(features, 100, window=16)
        features.write(100, 103)
        proposed = bench.propose(103)
        assert unpack(proposed.tokens) == bench.expected(features, 103, window=16)
        assert proposed.context_rows == 16


def test_the_context_ring_wraps_many_times(tmp_path):
    with Bench(tmp_path, context_window=16) as bench:
        features = bench.sequence()
        for base in range(5, 160, 5):
            features.write(base - 5, base)
            assert bench.tokens(base) == bench.expected(features, base, window=16), base


def test_a_sequence_may_ask_for_less_context_than_there_is(bench):
    features = bench.sequence(draft_context=10)
    features.write(0, 40)
    assert bench.tokens(40) == bench.expected(features, 40, window=10)
    assert bench.propose(40).context_rows == 10


def test_more_context_than_there_is_is_cut_to_the_daemons(bench):
    features = bench.sequence(draft_context=1000)
    features.write(0, 90)
    assert bench.propose(90).context_rows == 64


def test_two_sequences_do_not_see_each_other(bench):
    one, two = bench.sequence(1, slot=0), bench.sequence(2, slot=1)
    one.write(0, 20)
    two.write(0, 25)
    assert bench.tokens(20, sequence=1) == bench.expected(one, 20)
    assert bench.tokens(25, sequence=2) == bench.expected(two, 25)
    assert bench.tokens(20, sequence=1) == bench.expected(one, 20)


def test_a_slot_forgets_its_last_sequence(bench):
    bench.sequence(1).write(0, 60)
    bench.propose(60)
    closed = bench.engine.close(CloseItem(sequence=1, keep=50))
    assert closed.committed == 50
    features = bench.sequence(2)
    features.write(0, 4)
    assert bench.tokens(4, sequence=2) == bench.expected(features, 4)
    assert bench.propose(4, sequence=2).context_rows == 4


def test_a_block_without_any_context_is_possible(bench):
    features = bench.sequence()
    assert bench.tokens(0) == bench.expected(features, 0)


@pytest.mark.parametrize("layout", ["head", "head_t", "tied"])
def test_every_layout_of_the_targets_head_gives_the_same_tokens(tmp_path, layout):
    with Bench(tmp_path, layout=layout) as bench:
        features = bench.sequence()
        features.write(0, 11)
        scores = embedding(bench.draft.config) if layout == "tied" else None
        assert bench.tokens(11) == bench.expected(features, 11, scores=scores)


@pytest.mark.parametrize("layout", ["head", "head_t"])
def test_padding_rows_of_the_head_are_never_proposed(tmp_path, layout):
    with Bench(tmp_path, layout=layout, vocab_size=20) as bench:
        features = bench.sequence()
        features.write(0, 11)
        expected = bench.expected(features, 11, scores=head(bench.draft.config)[:20])
        assert bench.tokens(11) == expected != bench.expected(features, 11)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_target_in_16_bits_serves_a_draft_in_fp32(tmp_path, dtype):
    with Bench(tmp_path, dtype=dtype, layout="head") as bench:
        features = bench.sequence()
        features.write(0, 15)
        pairs = [
            (bench.tokens(15, pending=at), bench.expected(features, 15, pending=at))
            for at in range(8)
        ]
        # Rounding rows and head to eight bits moves a close decision, not most of them.
        same = sum(a == b for ours, exact in pairs for a, b in zip(ours, exact, strict=True))
        assert same >= 32


def test_an_anchored_draft_proposes_from_the_first_slot_on(tmp_path):
    raw = merged(Z_LAB, dflash_config={"sample_from_anchor": True})
    with Bench(tmp_path, raw) as bench:
        features = bench.sequence()
        features.write(0, 13)
        for width in (2, 5, 7):
            tokens = bench.tokens(13, width=width)
            assert len(tokens) == width - 1
            assert tokens == bench.expected(features, 13, width=width)


def test_a_reduced_vocabulary_answers_the_targets_ids(tmp_path):
    ids = torch.tensor([2, 30, 31, 64, 95])
    own = uniform((5, 32), 77)
    extra = {"lm_head.weight": own, "d2t": ids - torch.arange(5)}
    raw = merged(SPECULATORS, draft_vocab_size=5)
    with Bench(tmp_path, raw, extra=extra) as bench:
        features = bench.sequence()
        features.write(0, 8)
        best = bench.expected(features, 8, scores=own)
        assert bench.tokens(8) == ids[best].tolist()


def test_the_drafts_own_embedding_scale_is_applied(tmp_path):
    raw = merged(Z_LAB, dflash_config={"input_embedding_scale": 40.0})
    with Bench(tmp_path, raw) as bench, Bench(tmp_path / "plain") as plain:
        for each in (bench, plain):
            each.sequence().write(0, 8)
        scaled = [bench.tokens(8, pending=pending) for pending in range(8)]
        assert scaled != [plain.tokens(8, pending=pending) for pending in range(8)]


def test_warming_up_leaves_nothing_behind(bench):
    bench.engine.warm_up()
    features = bench.sequence()
    features.write(0, 3)
    assert bench.tokens(3) == bench.expected(features, 3)
    assert bench.propose(3).context_rows == 3


def test_slots_and_sequences_are_checked(bench):
    bench.sequence(1, slot=0)
    for slot in (-1, 0, 2):
        with pytest.raises(Overloaded, match=f"slot {slot}"):
            bench.engine.open(OpenItem(sequence=2, slot=slot))
    with pytest.raises(UsageError, match="open already"):
        bench.engine.open(OpenItem(sequence=1, slot=1))
    for call, item in (
        (bench.engine.ingest, IngestItem(sequence=9, stop=1)),
        (bench.engine.close, CloseItem(sequence=9)),
    ):
        with pytest.raises(UnknownSequence, match="sequence 9"):
            call(item)


def test_ids_outside_the_table_are_refused_and_change_nothing(bench):
    features = bench.sequence()
    features.write(0, 6)
    for pending in (-1, 96):
        with pytest.raises(UsageError, match=r"0\.\.95"):
            bench.propose(6, pending=pending)
    assert bench.tokens(6) == bench.expected(features, 6)


def test_positions_past_the_drafts_table_are_refused(tmp_path):
    raw = merged(Z_LAB, max_position_embeddings=16)
    with Bench(tmp_path, raw) as bench:
        features = bench.sequence()
        features.write(0, 16)
        assert bench.tokens(10) == bench.expected(features, 10)
        with pytest.raises(UnsupportedModel, match="position 16 is past the draft's 16"):
            bench.propose(11)


def test_a_longer_sequence_than_the_first_table_gets_a_longer_one(tmp_path, monkeypatch):
    monkeypatch.setattr("draft_daemon.models.dflash.FIRST_POSITIONS", 8)
    with Bench(tmp_path) as bench:
        features = bench.sequence()
        features.write(0, 30)
        assert bench.tokens(30) == bench.expected(features, 30)


def test_rows_of_another_sequence_or_not_yet_written_are_refused(bench):
    features = bench.sequence()
    features.write(0, 5)
    with pytest.raises(ProtocolError, match="6"):
        bench.propose(6)
    bench.ring.release(0)
    with pytest.raises(FeatureExpired):
        bench.propose(5)
    assert bench.engine.close(CloseItem(sequence=1)).committed == 0


def test_weights_of_another_shape_are_refused(tmp_path):
    with Bench(tmp_path) as bench:
        other = load_draft(
            write_draft(tmp_path / "other", merged(Z_LAB, vocab_size=95)), torch.float32
        )
        with pytest.raises(DraftMismatch, match=r"embed is \(96, 32\).*\(95, 32\)"):
            Engine(other, bench.guest, vocab_size=95, slots=1, context_window=16, max_ingest=8)


def test_a_network_that_cannot_compute_fails_before_it_is_ready(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise RuntimeError("could not create a primitive")

    folder, threads = write_draft(tmp_path / "d", merged(Z_LAB)), torch.get_num_threads()
    config = DraftConfig(draft=str(folder), run_dir="", life=1, threads=threads)
    steps = []
    with load_daemon(config, lambda *step: steps.append(step)):
        assert [step for step in steps if step[1]] == [(0, 1), (1, 1)]
    monkeypatch.setattr(DFlash, "block", refuse)
    with pytest.raises(RuntimeError, match="primitive"), load_daemon(config, lambda *_: None):
        pass


def test_the_shipped_draft_loads():
    folder = Path(__file__).parents[2] / "draft_daemon" / "checkpoints" / "smollm2-135m-dflash"
    draft = load_draft(folder, torch.float32)
    assert draft.weight_bytes == 24_561_408
    assert draft.config.num_target_layers == 30
