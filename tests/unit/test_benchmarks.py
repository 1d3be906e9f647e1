"""What benchmarks compute of their measurements; running them is in tests/process."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest
from support.tiny_text import ids_of, write_speaking_pair

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import decode  # noqa: E402
import draft_vocab  # noqa: E402
import peers  # noqa: E402
import record_widths  # noqa: E402
import spinning  # noqa: E402
import tree  # noqa: E402
from measuring import machine  # noqa: E402
from measuring.figures import (  # noqa: E402
    Generation,
    Round,
    acceptance,
    identical,
    percentile,
    ratios,
    same_forwards,
    spread,
    stages,
)
from measuring.modes import Worker  # noqa: E402
from measuring.prompts import DEFAULT, Prompt, read_prompts  # noqa: E402

from launch.tree import Slot  # noqa: E402

WIDE = Round(3, (7, 8), (7, 9, 4), 2, 0.001, 0.002, 0.004, 0.010)
NARROW = Round(1, (), (5,), 1, 0.0, 0.0, 0.004, 0.005)


def run(name, ids, seconds, rounds=()):
    return Generation(name, tuple(ids), 1.0, 1.0 + seconds, tuple(rounds))


def test_tokens_per_second_count_what_came_after_the_first_token():
    assert run("a", range(11), 2.0).tokens_per_second == 5.0


def test_a_ratio_is_made_prompt_by_prompt_and_leaves_out_texts_of_one_token():
    runs = {
        "speculative": [run("a", range(11), 1.0), run("b", range(11), 2.0), run("c", [1], 0.0)],
        "inprocess": [run("a", range(11), 2.0), run("b", range(11), 1.0), run("c", [1], 0.0)],
    }
    found = ratios(runs, [("speculative", "inprocess"), ("speculative", "absent")])
    assert list(found) == ["speculative/inprocess"]
    assert found["speculative/inprocess"] == spread([2.0, 0.5])


def test_a_percentile_is_a_value_that_was_measured():
    values = list(range(1, 101))
    assert percentile(values, 0.99) == 99
    assert percentile(values, 0.25) == 25
    assert percentile([3.0], 0.99) == 3.0


def test_overhead_is_the_wall_time_that_no_engine_accounts_for():
    assert stages([WIDE])["overhead"]["median"] == pytest.approx(3.0)
    assert stages([NARROW])["overhead"]["median"] == pytest.approx(1.0)
    assert stages([]) == {}


def test_acceptance_counts_rounds_that_proposed_something():
    found = acceptance([WIDE, NARROW, WIDE])
    assert (found["num_drafts"], found["num_draft_tokens"]) == (2, 4)
    assert found["mean_acceptance_length"] == 2.0
    assert acceptance([NARROW]) == {}


def test_texts_that_part_are_named_with_the_place():
    one = [run("a", [1, 2, 3], 1.0), run("b", [1, 2], 1.0), run("c", [4], 1.0)]
    other = [run("a", [1, 9, 3], 1.0), run("b", [1, 2, 3], 1.0), run("c", [4], 1.0)]
    found = identical(one, other)
    assert (found["prompts"], found["identical"]) == (3, 1)
    assert found["parted"] == [{"prompt": "a", "position": 1}, {"prompt": "b", "position": 2}]


@pytest.mark.parametrize(
    "change",
    [{"width": 2}, {"proposed": (7, 7)}, {"chosen": (7, 9, 5)}],
    ids=lambda c: next(iter(c)),
)
def test_another_forward_is_found_and_other_times_are_not(change):
    slow = dataclasses.replace(WIDE, wall=1.0, draft=0.5)
    one = [run("a", [1], 1.0, [NARROW, WIDE])]
    assert same_forwards(one, [run("a", [1], 1.0, [NARROW, slow])]) == []
    other = [run("a", [1], 1.0, [NARROW, dataclasses.replace(WIDE, **change)])]
    assert same_forwards(one, other) == ["a: 2 and 2 rounds part at 1"]
    assert same_forwards(one, [run("a", [1], 1.0, [NARROW])]) == ["a: 2 and 1 rounds part at 1"]


def test_a_few_prompts_are_taken_from_the_whole_file(tmp_path):
    target, _ = write_speaking_pair(tmp_path)
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": str(n), "task": "t", "turns": [f"text {n}"]} for n in range(6)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    found, stops = read_prompts(path, target, 3)
    assert [prompt.name for prompt in found] == ["0", "2", "4"]
    assert found[1] == Prompt("2", "t", tuple(ids_of("[user]text 2[answer]")))
    assert stops
    assert len(read_prompts(path, target, 0)[0]) == len(read_prompts(path, target, 99)[0]) == 6
    path.write_text("\n")
    with pytest.raises(ValueError, match="no prompts"):
        read_prompts(path, target, 3)


def test_the_shipped_prompts_are_our_own():
    rows = [json.loads(line) for line in DEFAULT.read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows) == 12
    public = ROOT.parent / "shared" / "prompts" / "spec_bench_public.jsonl"
    if public.exists():
        theirs = {json.loads(line)["turns"][0] for line in public.read_text().splitlines()}
        assert theirs.isdisjoint(row["turns"][0] for row in rows)


def test_memory_of_a_process_is_read_from_the_kernel():
    found = machine.memory(os.getpid())
    assert 0 < found["private"] <= found["rss"] <= found["peak_rss"]
    assert found["pss"] <= found["rss"]


def test_the_machine_says_processor_versions_and_commit():
    found = machine.describe()
    assert found["cores"] >= 1
    assert found["versions"]["torch"]
    assert json.dumps(found)


def test_a_daemon_may_hold_its_weights_and_some_more():
    mode = {
        "facts": {"weight_bytes": {"target": 400e6, "draft": 100e6}},
        "memory": {"target": {"rss": 9e8}, "draft": {"private": 2e8}, "supervisor": {}},
    }
    assert decode.memory_bars({"speculative": mode}) == {
        "target": {"held": 9e8, "bar": 1000e6},
        "draft": {"held": 2e8, "bar": 525e6},
    }
    assert decode.memory_bars({}) == {}


def test_a_worker_that_ends_early_is_an_error_with_its_exit_code():
    with pytest.raises(RuntimeError, match="ended with 3"):
        Worker([sys.executable, "-c", "import sys; sys.exit(3)"], "broken", {})


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--modes", "speculative,quick"], "unknown modes"),
        (["--modes", "concurrent"], "ask for both"),
    ],
)
def test_a_bad_mode_is_refused(arguments, complaint, capsys):
    with pytest.raises(SystemExit):
        decode.parse(arguments)
    assert complaint in capsys.readouterr().err


def test_peers_choose_what_they_are_compared_with(capsys):
    options = peers.parse(["--peers", "transformers,reference", "--limit", "2"])
    assert options.modes == ("autoregressive", "speculative")
    assert options.limit == 2
    for arguments, complaint in ((["--peers", "x"], "unknown"), (["--peers", "llama-cpp"], "gguf")):
        with pytest.raises(SystemExit):
            peers.parse(arguments)
        assert complaint in capsys.readouterr().err


def test_a_peer_without_its_environment_says_how_to_make_one(tmp_path, monkeypatch):
    monkeypatch.setitem(peers.HOMES, "reference", peers.ROOT / "absent")
    with pytest.raises(FileNotFoundError, match="make reference"):
        peers.interpreter("reference")


def test_a_spin_setting_is_what_daemons_inherit_and_nothing_else(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    with spinning.environment("GOMP_SPINCOUNT=5,OMP_NUM_THREADS=2"):
        assert (os.environ["GOMP_SPINCOUNT"], os.environ["OMP_NUM_THREADS"]) == ("5", "2")
        assert "OMP_WAIT_POLICY" not in os.environ
    assert os.environ["OMP_WAIT_POLICY"] == "active"
    assert "GOMP_SPINCOUNT" not in os.environ


def test_a_recorded_block_is_right_up_to_its_first_wrong_id():
    emitted = [5, 6, 7, 8]
    texts = [record_widths.right(emitted, [(6, 7, 9), (7, 8, 1), (1, 1, 1)])]
    assert texts == [[2, 2, 0]]
    assert draft_vocab.tokens_a_round(texts) == 3.0


def test_a_tree_is_played_over_the_same_answers_as_its_chain():
    tokens = list(range(40))
    # The right token is the second of every slot: a chain never has it, a tree of 8 rows often.
    slots = [
        [[Slot((90 + at, step + at + 1), (-0.7, -0.8)) for at in range(4)]] for step in range(39)
    ]
    text = tree.Text(tokens, slots)
    assert tree.play([text], 5, 4, branches=False) == 1.0
    assert tree.play([text], 8, 1) > 1.5
    found = tree.compare([text])
    assert found["4"]["chain"] == 1.0
    assert found["24"]["tree"] >= found["8"]["tree"]


def test_a_tree_at_a_temperature_is_played_with_the_part_that_is_right_at_each_slot():
    tokens = list(range(200))
    # Asked at the whole temperature the draft is always right, at less of it never.
    slots = [
        [
            [Slot((step + at + 1 if part == 2 else 900, 901), (-0.1, -2.0)) for at in range(4)]
            for part in range(3)
        ]
        for step in range(199)
    ]
    text = tree.Text(tokens, slots)
    assert tree.play([text], 5, 4, part=0) == 1.0
    assert tree.play([text], 5, 4, part=2) > 4.8
    assert tree.play([text], 5, 4, part=3) > 3.5
    assert set(tree.compare_all([text], 0.7)) == {
        "coupled at 0",
        "coupled at 0.5",
        "coupled at 1",
        tree.ONLINE,
    }
