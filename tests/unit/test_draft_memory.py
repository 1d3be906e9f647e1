"""A draft's memory is counted before it is loaded, and refused with the arithmetic."""

import json
import re

import pytest
import torch
from support.supervised import plan_for
from support.tiny_draft import SPECULATORS, merged, write_draft
from support.tiny_pair import write_pair

from draft_daemon.checkpoint import find_network, load_draft
from draft_daemon.daemon import load_daemon
from draft_daemon.memory_plan import plan
from launch.supervisor import Supervisor
from protocol.checkpoints.draft_config import read_draft_config
from protocol.config import DraftConfig
from protocol.errors import InsufficientMemory
from protocol.memory import Available
from protocol.transports.devices import Device

LAYERS, WIDE = 2, 2 * 8  # of the tiny draft: two key and value heads of 8


def plan_of(folder, *, vocabulary=0, dtype=torch.float32, **changes):
    config = read_draft_config(folder)
    settings = DraftConfig(draft=str(folder), run_dir="r", life=1, context_window=64, **changes)
    return plan(config, find_network(config), settings, dtype, vocabulary)


def sizes(found):
    return {line.name: line.size for line in found.lines}


def test_the_weights_are_those_that_are_loaded(tmp_path):
    folder = write_draft(tmp_path / "draft")
    assert sizes(plan_of(folder))["weights"] == load_draft(folder, torch.float32).weight_bytes


def test_a_head_of_the_drafts_own_is_counted(tmp_path):
    folder = tmp_path / "draft"
    folder.mkdir()
    raw = merged(SPECULATORS, draft_vocab_size=40)
    (folder / "config.json").write_text(json.dumps(raw))
    assert sizes(plan_of(folder))["own head"] == 40 * 32 * 4


def test_context_copies_and_work_are_counted_in_full(tmp_path):
    folder = write_draft(tmp_path / "draft")
    found = sizes(plan_of(folder, slots=3, vocabulary=10, target_model="m", dtype=torch.bfloat16))
    assert found["context"] == 3 * (64 + 6) * 2 * LAYERS * WIDE * 2
    assert found["copied rows of the head"] == 10 * 32 * 2
    assert found["embedding and head, copied"] == 2 * 96 * 32 * 2
    assert found["working memory"] > 0
    assert "embedding and head, copied" not in sizes(plan_of(folder))


def test_what_fits_is_one_line_and_what_does_not_is_every_line_and_the_remedy(tmp_path):
    counted = plan_of(write_draft(tmp_path / "draft"))
    said = counted.check(Available(counted.needed, "a test"))
    assert said.startswith("memory: ")
    assert all(line.name in said for line in counted.lines)
    with pytest.raises(InsufficientMemory, match=r"the draft needs(.|\n)*at most 63 tokens"):
        counted.check(Available(counted.needed - 1, "a test"))
    with pytest.raises(InsufficientMemory, match="Even without any context"):
        counted.check(Available(counted.fixed, "a test"))


def test_a_draft_that_does_not_fit_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    folder = write_draft(tmp_path / "draft", without=("fc.weight",))  # loading it would fail
    monkeypatch.setattr(Device, "available", lambda _: Available(1000, "a test"))
    config = DraftConfig(draft=str(folder), run_dir="r", life=1, threads=torch.get_num_threads())
    with pytest.raises(InsufficientMemory), load_daemon(config, lambda *_: None):
        pass


@pytest.mark.process
def test_both_plans_are_told_while_the_daemons_load(tmp_path):
    steps = []
    pair = write_pair(tmp_path)
    with Supervisor(plan_for(*pair), on_loading=steps.append) as supervisor:
        supervisor.wait_ready()
    told = {step.role: step.detail for step in steps if step.detail.startswith("memory: ")}
    assert re.search("keys and values .* MB", told["target"])
    assert re.search("context .* MB", told["draft"])
