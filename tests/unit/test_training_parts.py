"""The parts of a training run: data and order, schedule, rows of the head, lines, files."""

import os
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from support.shards import kept, write_made_shard

from draft_daemon.training import curve, journal
from draft_daemon.training.batches import Goals
from draft_daemon.training.data import Corpus, Place
from draft_daemon.training.files import whole, write_tensors
from draft_daemon.training.journal import Stepped
from draft_daemon.training.lines import Lines
from draft_daemon.training.optimiser import Average
from draft_daemon.training.order import Order, Pick
from draft_daemon.training.ranks import Ranks, device_of, joined, share_of
from draft_daemon.training.schedule import schedule_of
from draft_daemon.training.walk import Figures
from protocol.config import Deadlines
from protocol.ending import Ended
from protocol.errors import CheckpointError, ConfigError, TemporaryFailure, Unavailable
from protocol.memory import Available
from protocol.training import CACHED_SHARDS, Report, TrainConfig, Validated

VOCAB, TAPS = 97, (0, 2)


def config_of(**changes):
    settings = {"model": "m", "folder": "f", "taps": TAPS, "mask_token_id": 3, "steps": 100}
    settings |= {"sequences": 4, "anchors": 3, "frequent_rows": 20, "random_rows": 10}
    return TrainConfig(**(settings | changes))


@pytest.fixture
def corpus(tmp_path):
    """Three shards of five sequences, the first of each held out."""
    for number in range(3):
        many = [
            kept(10 * number + index, held_out=index == 0, answer=6 + index) for index in range(5)
        ]
        write_made_shard(tmp_path, number, many, taps=TAPS, width=8)
    with Corpus(tmp_path, TAPS, VOCAB, None) as opened:
        yield opened


def places_of(order, count):
    return [order._place(at) for at in range(count)]


def test_a_pass_sees_every_sequence_once_and_none_that_is_held_out(corpus):
    assert (corpus.facts.sequences, corpus.facts.held_out) == (12, 3)
    order = Order(corpus, config_of())
    first, second = (places_of(order, 24)[start : start + 12] for start in (0, 12))
    every = {Place(shard, sequence) for shard in range(3) for sequence in range(1, 5)}
    assert set(first) == set(second) == every
    assert first != second
    assert corpus.walked == [Place(shard, 0) for shard in range(3)]
    assert order.passes(6) == 2.0


def test_the_order_depends_on_seed_and_step_alone(corpus):
    order, again = Order(corpus, config_of()), Order(corpus, config_of())
    for number in (7, 0, 7, 3):
        ours, theirs = order.step(number, whole=False), again.step(number, whole=False)
        assert [pick.anchors.tolist() for pick in ours.picks] == [
            pick.anchors.tolist() for pick in theirs.picks
        ]
        assert ours.rows.tolist() == theirs.rows.tolist()
        assert ours.total == theirs.total
    other = Order(corpus, config_of(seed=1))
    assert places_of(other, 12) != places_of(order, 12)


def test_anchors_lie_in_the_answer_and_have_something_behind_them(corpus):
    step = Order(corpus, config_of(anchors=99)).step(0, whole=False)
    for pick in step.picks:
        places = range(pick.text.prompt, len(pick.text.tokens) - 1)
        assert pick.anchors.tolist() == list(places)
    few = Order(corpus, config_of()).step(0, whole=False)
    assert all(len(set(pick.anchors.tolist())) == 3 for pick in few.picks)


def test_rows_of_the_head_hold_what_the_step_is_about_and_random_ones_that_stand_for_others(corpus):
    step = Order(corpus, config_of()).step(0, whole=False)
    rows = set(step.rows.tolist())
    for pick in step.picks:
        first = int(pick.anchors[0])
        assert rows >= set(pick.text.tokens[first + 1 :].tolist())
        assert rows >= set(pick.text.top_ids[first:-1].flatten().tolist())
    drawn = step.offset > 0
    assert len(rows) == len(step.rows)
    assert drawn.sum() == 10
    others = VOCAB - (~drawn).sum()
    assert step.offset[drawn] == pytest.approx(np.log(others / 10))


@pytest.mark.parametrize("change", [{"frequent_rows": 0}, {"frequent_rows": VOCAB}])
def test_without_frequent_rows_or_at_the_end_all_rows_are_scored(corpus, change):
    assert Order(corpus, config_of()).step(0, whole=True).rows is None
    assert Order(corpus, config_of(**change)).step(0, whole=False).rows is None


def test_a_goal_is_the_token_and_what_the_target_found_likely(corpus):
    order = Order(corpus, config_of(block_size=4))
    text = corpus.text(Place(1, 3))
    pick = Pick(text, np.array([text.prompt, len(text.tokens) - 2]))
    goal = Goals(VOCAB, order.slot_weights, 0.5).of([pick], 4, None, torch.device("cpu"))
    assert goal.picked.tolist() == [1, 2, 3, 5]
    assert goal.slots.tolist() == [0, 1, 2, 0]
    places = [text.prompt + 1, text.prompt + 2, text.prompt + 3, len(text.tokens) - 1]
    assert goal.wanted.columns[:, 0].tolist() == text.tokens[places].tolist()
    assert goal.wanted.shares.sum(1).tolist() == pytest.approx([1.0] * 4)
    odds = np.exp(text.top_logprobs[places[0] - 1].astype(float))
    soft = 0.5 * odds / odds.sum()
    assert goal.wanted.shares[0].tolist() == pytest.approx([0.5, *soft], rel=1e-3)
    assert goal.wanted.weights.tolist() == pytest.approx(np.exp([0, -0.25, -0.5, 0]).tolist())


def test_blocks_are_short_until_they_are_whole(corpus):
    order = Order(corpus, config_of(gamma=1.5))
    short, whole = (order.step(0, whole=each) for each in (False, True))
    assert (short.width, whole.width) == (4, 8)
    goals = Goals(VOCAB, order.slot_weights, 0.5)
    for step in (short, whole):
        goal = goals.of(step.picks, step.width, step.rows, torch.device("cpu"))
        assert goal.slots.max() + 2 == min(step.width, 8)
        assert goal.wanted.weights.sum() == pytest.approx(step.total)
    assert Order(corpus, config_of()).step(0, whole=False).width == 8
    assert Order(corpus, config_of(gamma=0.1)).step(0, whole=False).width == 2


def test_where_the_target_said_nothing_the_token_is_the_goal(corpus):
    text = corpus.text(Place(0, 1))
    bare = type(text)(
        text.tokens, text.prompt, text.top_ids * 0, text.top_logprobs * 0, text.features, ""
    )
    pick = Pick(bare, np.array([text.prompt]))
    goal = Goals(VOCAB, np.ones(3), 0.5).of([pick], 4, None, torch.device("cpu"))
    assert goal.wanted.shares[:, 0].tolist() == [1.0] * 3


def test_a_true_token_that_is_not_scored_is_refused(corpus):
    text = corpus.text(Place(0, 1))
    pick = Pick(text, np.array([text.prompt]))
    rows = np.setdiff1d(np.arange(VOCAB), text.tokens[-1:])
    goals = Goals(VOCAB, np.ones(8), 0.5)
    with pytest.raises(ConfigError, match="not among the rows"):
        goals.of([pick], 9, rows, torch.device("cpu"))
    assert goals.of([pick], 9, None, torch.device("cpu")).slots.tolist() == list(
        range(len(text.tokens) - 1 - text.prompt)
    )


def test_too_little_data_and_missing_features_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="0 sequences to train on and 0 greedy"):
        Corpus(tmp_path / "nothing", TAPS, VOCAB, None)
    write_made_shard(tmp_path, 0, [kept(1), kept(2, held_out=True)])
    corpus = Corpus(tmp_path, TAPS, VOCAB, None)
    with pytest.raises(ConfigError, match="shard 0 has no features, and no config"):
        assert corpus.text(Place(0, 0)).features is None


def test_sampled_answers_are_not_walked_and_short_ones_not_used(tmp_path):
    many = [kept(1), kept(2, answer=1), kept(3, held_out=True)]
    many += [kept(4, held_out=True, temperature=1.0), kept(5, held_out=True, answer=1)]
    write_made_shard(tmp_path, 0, many)
    corpus = Corpus(tmp_path, TAPS, VOCAB, None)
    assert corpus.trained[0].tolist() == [0]
    assert corpus.walked == [Place(0, 2)]
    assert corpus.counts.sum() == 6


def test_missing_features_are_made_and_old_shards_are_forgotten(tmp_path):
    asked = []

    def make(number, shard):
        asked.append(number)
        return np.zeros((len(shard.tokens), 16), np.uint16)

    for number in range(CACHED_SHARDS + 2):
        write_made_shard(tmp_path, number, [kept(number), kept(number + 100, held_out=True)])
    corpus = Corpus(tmp_path, TAPS, VOCAB, make)
    for number in (*range(CACHED_SHARDS + 2), 0, CACHED_SHARDS + 1):
        assert corpus.text(Place(number, 0)).features.shape == (10, 16)
    assert asked == [*range(CACHED_SHARDS + 2), 0]
    assert len(corpus._shards) == CACHED_SHARDS


def test_features_are_made_for_the_sequences_of_this_rank_alone(tmp_path):
    asked = []

    def make(number, shard):
        asked.append(number)
        return np.zeros((len(shard.tokens), 16), np.uint16)

    for number in range(4):
        write_made_shard(tmp_path, number, [kept(number), kept(number + 100, held_out=True)])
    with Corpus(tmp_path, TAPS, VOCAB, make) as corpus:
        step = Order(corpus, config_of()).step(0, whole=False)
        assert asked == []
        for pick in Ranks(1, 4).share(step.picks, lambda pick: len(pick.anchors)):
            assert len(pick.text.features) == 10
    assert len(asked) == 1


def test_ranks_of_one_host_share_its_memory_and_each_has_its_own_gpu(monkeypatch):
    free, ranks = Available(1200, "here"), Ranks(0, 4)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert share_of(free, "cpu", Ranks()) == free
    assert share_of(free, "cuda:0", ranks) == free
    assert share_of(free, "cpu", ranks) == Available(300, "here, for each of 4 processes")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert share_of(free, "cpu", ranks).size == 600


def test_the_rate_warms_up_and_falls_to_a_tenth():
    schedule = schedule_of(config_of(rate=2.0))
    rates = [schedule.rate_at(schedule.progress(step, 0.0)) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[2]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] == pytest.approx(0.2)
    assert [schedule.is_whole(part) for part in (0.0, 0.8, 0.86, 1.0)] == [False, False, True, True]


def test_the_clock_is_a_schedule_as_well():
    schedule = schedule_of(config_of(steps=0, hours=2.0))
    assert schedule.progress(10**6, 3600.0) == 0.5
    assert schedule.progress(1, 8000.0) == 1.0


def test_without_decay_the_average_is_the_weights():
    network = torch.nn.Linear(2, 2)
    average, slow = Average(network, 0.0), Average(network, 0.9)
    with torch.no_grad():
        network.weight.add_(1.0)
    for each in (average, slow):
        each.update(1000)
    assert torch.equal(average.weights["weight"], network.weight)
    expected = network.weight - 0.9
    torch.testing.assert_close(slow.weights["weight"], expected)


def test_figures_count_rounds_and_slots():
    figures = Figures()
    assert figures.mean_acceptance_length == 0.0
    for task, accepted in (("a", 0), ("a", 2), ("b", 1)):
        figures.add(task, accepted)
    assert figures.mean_acceptance_length == 2.0
    assert figures.by_task() == {"a": 2.0, "b": 2.0}
    assert figures.per_slot(3) == pytest.approx((2 / 3, 1 / 3, 0.0))


def test_one_process_is_alone_and_a_strange_world_is_refused(monkeypatch):
    with joined("cpu", {}) as ranks:
        assert ranks == Ranks()
    with pytest.raises(ConfigError, match="no numbers"), joined("cpu", {"WORLD_SIZE": "two"}):
        pass
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert (device_of("cpu"), device_of("cuda:0")) == ("cpu", "cuda:3")


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_ranks_share_a_step_so_that_each_has_about_as_much_to_do(world):
    sizes = [50, 900, 300, 120, 640, 80, 410, 700]
    shares = [Ranks(rank, world).share(sizes, int) for rank in range(world)]
    assert sorted(size for share in shares for size in share) == sorted(sizes)
    even = [sum(sizes[rank::world]) for rank in range(world)]
    assert max(map(sum, shares)) <= max(even)


def test_ranks_wait_for_one_that_is_at_work_longer_than_for_one_that_is_silent(monkeypatch):
    told = {}
    monkeypatch.setattr("torch.distributed.init_process_group", lambda _, **by: told.update(by))
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: None)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with joined("cpu", {"WORLD_SIZE": "2", "RANK": "1"}) as ranks:
        assert ranks == Ranks(1, 2)
    assert told["timeout"].total_seconds() > Deadlines().training_silence


def stepped(step):
    return Stepped(step=step, loss=1.0, rate=0.1, accuracy=(0.5,), tokens=3, seconds=1.0)


def validated(step):
    return Validated(
        step=step, mean_acceptance_length=1.5, by_task={}, accepted_per_slot=(0.5,), best=True
    )


def test_a_journal_is_cut_to_what_a_state_knows(tmp_path):
    path = tmp_path / "train.jsonl"
    journal.cut(path, 0, -1)
    book = journal.Journal(path)
    for line in (validated(0), stepped(0), stepped(1), validated(2), stepped(2)):
        book.write(line)
    book.close()
    journal.cut(path, 2, 0)
    assert journal.read_journal(path) == [validated(0), stepped(0), stepped(1)]


def test_a_damaged_line_is_left_out_of_a_journal_that_is_gone_on_with(tmp_path, caplog):
    path = tmp_path / "train.jsonl"
    book = journal.Journal(path)
    book.write(stepped(0))
    path.write_bytes(path.read_bytes() + b"nonsense\n\xff\n")
    book.write(stepped(1))
    book.close()
    with pytest.raises(CheckpointError, match="line 2"):
        journal.read_journal(path)
    journal.cut(path, 2, 0)
    assert journal.read_journal(path) == [stepped(0), stepped(1)]
    assert "line 2" in caplog.text
    assert "line 3" in caplog.text


def test_a_curve_is_drawn_of_whatever_is_there(tmp_path):
    for lines in ([], [validated(0)], [validated(0), *map(stepped, range(60)), validated(60)]):
        curve.draw(tmp_path / "curve.png", lines)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'dflash-daemons\[train\]'"):
        curve.check_library()


def test_a_file_that_is_not_finished_leaves_the_old_one(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def interrupted():
        with whole(path) as hidden:
            hidden.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_disk_that_refuses_is_a_typed_error_with_the_path(tmp_path):
    path, limits = tmp_path / "state.safetensors", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(Unavailable, match=r"cannot write .*/state.safetensors: .*too large"):
            write_tensors(path, {"a": torch.zeros(4000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not os.listdir(tmp_path)
    book = journal.Journal(Path("/dev/full"))
    with pytest.raises(TemporaryFailure, match="cannot write /dev/full: No space left"):
        book.write(stepped(0))
    book.close()


def test_features_of_another_width_are_refused(corpus, tmp_path):
    assert corpus.text(Place(0, 0)).features.shape[1] == 16
    with (
        Corpus(tmp_path, TAPS, VOCAB, None, width=24) as other,
        pytest.raises(CheckpointError, match="rows are 16 wide, and the target's 24"),
    ):
        assert other.text(Place(0, 0)).features is None


def test_lines_wait_for_a_slow_reader_and_do_not_mind_one_that_is_gone():
    reader, writer = os.pipe()
    lines, report = Lines(writer), Report(stage="train", done=1, detail="x" * 60_000)
    lines.write(report, lambda: None)

    def give_up():
        raise Ended("it is time")

    with pytest.raises(Ended):
        lines.write(report, give_up)
    os.close(reader)
    lines.write(report, give_up)
    lines.close()
