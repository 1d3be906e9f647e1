"""Families without a forward for several texts are collected from all the same."""

import pytest
import torch
from support.collecting import ask, of, run
from support.foreign_target import write_foreign_target
from support.proven_targets import FAMILIES
from support.targets import load, prompt

from protocol.checkpoints.shards import map_features, read_shard
from protocol.training import Answered, Report

pytest.importorskip("transformers")
# That library warns.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_a_target_without_a_forward_for_several_is_asked_text_by_text_and_says_so(tmp_path, family):
    model, taps = write_foreign_target(tmp_path / "model", FAMILIES[family], seed=3), (0, 1)
    asks = [ask(n, prompt(6 + n, seed=n), most=6) for n in range(3)]
    code, lines = run(
        tmp_path, model, tmp_path / "data", asks, slots=2, taps=taps, feature_bytes=1 << 20
    )
    assert code == 0, lines[-1]
    told = [line.detail for line in of(Report, lines) if line.stage == "load"]
    assert any("answers one text at a time" in line for line in told)
    target = load(model, taps=taps, max_positions=96, prefill_chunk=64)
    shard = read_shard(tmp_path / "data", 0)
    kept = {int(shard.ids[at]): shard.tokens[shard.rows(at)].tolist() for at in range(3)}
    for answer in of(Answered, lines):
        asked = asks[answer.id]
        target.reset(0)
        logits = target.verify_batch(0, torch.tensor(asked.tokens), 0, "last")
        chosen = []
        while len(chosen) < 6:
            chosen.append(int(logits.argmax()))
            if chosen[-1] in target.eos_token_ids:
                break
            at = len(asked.tokens) + len(chosen) - 1
            logits = target.verify_batch(0, torch.tensor(chosen[-1:]), at, "last")
        assert kept[answer.id][len(asked.tokens) :] == chosen
    bits = map_features(tmp_path / "data", 0, shard, taps)
    assert bits.any(axis=1).sum() == len(shard.tokens) - shard.sequences  # all but the last rows
