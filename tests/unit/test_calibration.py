"""The first price list of a pair: swept once, remembered, and never believed when damaged."""

import msgspec
import pytest
from support.width_traces import Prices

from launch.auto_width import Experience
from launch.calibration import NUMBER, Calibration, Sweep
from launch.cost_cache import CostCache
from launch.costs import Costs
from launch.events import DraftFacts, TargetFacts
from launch.policy import Outcome, Situation
from launch.probes import Probes
from launch.statistics import Clock, Tally, statistics
from protocol.messages import Finished, Piece, Progress, Refused

KEY = {"model": "m", "threads": "2"}
DRAFT, TARGET = DraftFacts(1, 8, 64), TargetFacts(1, 96, 400, 32, 128, 16)
STEP = 0.01
PRICES = Prices(tuple(STEP * (1 + i / 8) for i in range(8)), (STEP / 4,) * 8, 1e-4)


def run(sweep, *, step=1.0):
    """Rounds until it is done; the widths that were run."""
    widths = []
    while not sweep.is_done:
        choice = sweep.choose(Situation(8, 100, 64))
        verify, draft, ingest, _ = PRICES.round(choice.verify, choice.propose, 1)
        offered = (-1,) * (choice.propose - 1)
        times = {"draft_seconds": draft * step, "ingest_seconds": ingest * step}
        sweep.note(
            Outcome(
                position=64,
                rows=choice.verify,
                offered=offered,
                drafted=len(offered),
                tokens=(1,),
                ingested=1,
                verify_seconds=verify * step,
                **times,
            )
        )
        widths.append(choice.verify)
    return widths


class Office:
    """A calibration, what it asked for, and how it ended."""

    def __init__(self, folder=None):
        self.asked, self.cancelled = [], []
        cache = None if folder is None else CostCache(folder)
        self.calibration = Calibration(
            cache, lambda *request: self.asked.append(request), self.cancelled.append
        )

    def sweep(self):
        """Run what was asked for, to its end."""
        (_, sink, find_stop, policy), *_ = self.asked
        assert find_stop is None
        sink(Progress(request=NUMBER, done=1, total=2))
        sink(piece())
        assert self.cancelled == []
        run(policy)
        sink(piece())
        assert self.cancelled == [NUMBER]
        sink(finished())


def piece():
    return Piece(
        request=NUMBER,
        position=1,
        tokens=b"",
        width=1,
        proposed=b"",
        chosen=b"",
        draft_seconds=0.0,
        ingest_seconds=0.0,
        verify_seconds=0.0,
    )


def finished():
    figures = statistics(
        Tally(),
        Clock(0.0),
        tokens=(1, 1),
        mode=("speculative", ""),
        transport="shm",
        target=("no", "fast"),
        stale=0,
    )
    return Finished(request=NUMBER, finish_reason="cancelled", statistics=figures)


def test_a_sweep_runs_the_step_and_the_whole_block_first_and_most_often():
    costs = Costs()
    widths = run(Sweep(costs, 8))
    assert widths[:4] == [1, 8, 1, 8]
    assert {1, 2, 4, 8} <= set(widths) <= set(range(1, 9))
    assert widths.count(1) == widths.count(8) == 3
    assert costs.verify.upto(8, 64)[7] == pytest.approx(PRICES.verify[7])


def test_a_sweep_ends_with_a_second_of_either_daemon():
    assert len(run(Sweep(Costs(), 8), step=60.0)) == 2


def test_a_sweep_goes_on_alone_when_the_draft_is_gone():
    sweep = Sweep(Costs(), 8)
    assert sweep.choose(Situation(1, 100, 64)).verify == 1
    assert sweep.reason() == ""


def test_without_a_folder_nothing_is_measured_and_nothing_remembered():
    office = Office()
    experience = office.calibration.begin(KEY, TARGET, DRAFT)
    office.calibration.end()
    assert office.asked == []
    assert experience is office.calibration.begin(KEY, TARGET, DRAFT)


def test_a_pair_is_swept_once_and_remembered_by_the_next_process(tmp_path):
    office = Office(tmp_path / "costs")
    experience = office.calibration.begin(KEY, TARGET, DRAFT)
    assert office.calibration.is_running
    office.sweep()
    assert not office.calibration.is_running
    assert office.calibration.begin(KEY, TARGET, DRAFT) is experience
    experience.acceptance.note(3, 7)
    experience.confidence.at(0.7).note(
        Outcome(0, 2, (5,), 1, (5, 6), 0.0, 0.0, 0, 1.0, confidences=(0.3,))
    )
    experience.costs.note_hand_over("target", 0.25)
    experience.lookups[3].note(2, 7)
    experience.probes = Probes(since=3, interval=64)
    office.calibration.end()

    again = Office(tmp_path / "costs")
    found = again.calibration.begin(KEY, TARGET, DRAFT)
    assert again.asked == []
    assert found.costs.alone(8, 64) == experience.costs.alone(8, 64)
    assert found.costs.asking(8, 64) == experience.costs.asking(8, 64)
    assert found.confidence.counts == experience.confidence.counts
    assert found.acceptance.counts == experience.acceptance.counts
    assert found.lookups[3].counts == experience.lookups[3].counts
    assert found.probes == experience.probes
    assert len(list((tmp_path / "costs").iterdir())) == 1


def test_every_temperature_and_a_time_of_nothing_are_remembered(tmp_path):
    experience, cache = Experience(), CostCache(tmp_path)
    for hundredths in range(1001):
        experience.confidence.at(hundredths / 100)
    for rows in range(1, 9):
        experience.costs.verify.note(rows, 0, 0.0)
    cache.save(KEY, experience)
    found = cache.load(KEY)
    assert found is not None
    assert found.confidence.counts == experience.confidence.counts
    assert found.costs.verify.upto(8, 0) == experience.costs.verify.upto(8, 0)


def test_another_key_is_another_pair(tmp_path):
    office = Office(tmp_path)
    office.calibration.begin(KEY, TARGET, DRAFT)
    office.sweep()
    assert CostCache(tmp_path).load({**KEY, "threads": "1"}) is None
    assert CostCache(tmp_path).load(KEY) is not None


def test_half_a_sweep_is_not_remembered(tmp_path):
    office = Office(tmp_path)
    office.calibration.begin(KEY, TARGET, DRAFT)
    office.calibration.end()
    office.asked[0][1](Refused(request=NUMBER, code="unavailable", detail="ending"))
    office.calibration.end()
    assert list(tmp_path.iterdir()) == []
    assert not office.calibration.is_running


@pytest.mark.parametrize(("room", "widest"), [(400, 1), (60, 8)])
def test_a_pair_with_nothing_to_choose_or_no_room_is_not_swept(tmp_path, room, widest):
    office, facts = Office(tmp_path), TargetFacts(1, 96, room, 32, 128, widest)
    office.calibration.begin(KEY, facts, DRAFT)
    assert office.asked == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'{"format"', b'"format"'),
        (b'"format":3', b'"format":2'),
        (b'"threads":"2"', b'"threads":"3"'),
        (b'"seen":[', b'"seen":[1.0,'),
        (b'"verify":[[0,1,', b'"verify":[[0,1,-'),
        (b'"verify":[[0,1,', b'"verify":[[0,0,'),
        (b'"hand_over":{', b'"hand_over":{"else":1.0,'),
    ],
)
def test_a_file_that_is_damaged_or_of_something_else_is_measured_again(tmp_path, old, new):
    experience = Experience()
    experience.costs.verify.note(1, 0, 0.5)
    experience.costs.note_hand_over("draft", 0.5)
    cache = CostCache(tmp_path)
    cache.save(KEY, experience)
    (path,) = tmp_path.iterdir()
    assert cache.load(KEY) is not None
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))
    assert cache.load(KEY) is None


@pytest.mark.parametrize(
    "lookups",
    [{1: ([9.0], [1.0])}, {1: ([1e6], [1e-300])}, {1: ([1.0], [2.0, 3.0])}, {77: ([1.0], [2.0])}],
)
def test_rates_that_cannot_be_are_not_taken_in(tmp_path, lookups):
    cache = CostCache(tmp_path)
    cache.save(KEY, Experience())
    (path,) = tmp_path.iterdir()
    found = msgspec.json.decode(path.read_bytes()) | {"lookups": lookups, "right": [9.0]}
    found |= {"seen": [1.0], "stated": {0: ([1.0] * 10, [0.0] * 10)}}
    path.write_bytes(msgspec.json.encode(found))
    experience = cache.load(KEY)
    assert experience.acceptance.counts == Experience().acceptance.counts
    assert experience.lookups[1].counts == Experience().lookups[1].counts
    assert experience.confidence.at(0.0).counts == Experience().confidence.at(0.0).counts


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    cache = CostCache(tmp_path / "file" / "costs")
    cache.save(KEY, Experience())
    assert cache.load(KEY) is None
