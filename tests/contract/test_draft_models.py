"""DFlash and DFlash2, on random tiny checkpoints, against the reference package's numbers.

The numbers in ``tests/data/dflash_reference.safetensors`` come from ``tests/reference/run.py``,
which runs ``dflash==0.1.0`` in an environment of its own (``make reference`` compares live).
"""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support.draft_cases import (
    CASES,
    ROUNDS,
    SELECTING,
    TOTAL,
    hidden_states,
    inputs,
    selected,
)
from support.tiny_draft import SPECULATORS, Z_LAB, head, merged, write_draft

from draft_daemon.checkpoint import load_draft
from draft_daemon.context import DraftContext
from draft_daemon.models.base import DraftNetwork
from protocol import plugins

STORE = Path(__file__).parents[1] / "data" / "dflash_reference.safetensors"
SAME = 3e-5  # of values around 1, in fp32: products of other widths are added up in another order
NETWORKS = plugins.names("draft_daemon.models", "NETWORK")


def load(folder, raw, dtype=torch.float32):
    return load_draft(write_draft(folder, raw), dtype)


def apart(ours, theirs):
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_found_by_its_module_name(name):
    assert plugins.load("draft_daemon.models", name, "NETWORK", DraftNetwork)


def test_the_stored_numbers_name_the_package_that_made_them():
    with safe_open(STORE, "pt") as store:
        assert store.metadata()["dflash"] == "0.1.0"
        assert {key.split(".")[0] for key in store.keys()} == set(CASES)  # noqa: SIM118


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_equal_the_reference_package(tmp_path, case):
    stored = load_file(STORE)
    theirs = [stored[f"{case}.hidden.{number}"] for number in range(len(ROUNDS))]
    assert apart(hidden_states(load(tmp_path, CASES[case])), theirs) < SAME


@pytest.mark.parametrize(
    ("case", "wrong"),
    [
        ("full", {"rope_theta": 10000.0}),
        ("full", {"is_causal": True}),
        ("sliding", {"is_causal": False}),
        ("sliding", {"sliding_window": 9}),
        ("sliding", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("sliding_bidirectional", {"is_causal": True}),
        ("causal", {"is_causal": False}),
        ("biased", {"rms_norm_eps": 1e-6}),
        ("llama3_rope", {"rope_parameters": {"factor": 2.0}}),
        ("dflash2", {"is_causal": True}),
    ],
)
def test_one_wrong_fact_is_told_from_the_reference(tmp_path, case, wrong):
    """Guards the test above: each of these is a silent loss of acceptance in the field."""
    stored = load_file(STORE)
    theirs = [stored[f"{case}.hidden.{number}"] for number in range(len(ROUNDS))]
    assert apart(hidden_states(load(tmp_path, merged(CASES[case], **wrong))), theirs) > 1e-3


@pytest.mark.parametrize("case", SELECTING)
def test_the_candidates_that_are_selected_equal_the_reference_package(tmp_path, case):
    stored, draft = load_file(STORE), load(tmp_path, CASES[case])
    hidden = hidden_states(draft)
    ours = selected(draft, hidden)
    theirs = [stored[f"{case}.tokens.{number}"] for number in range(len(ROUNDS))]
    assert [one.tolist() for one in ours] == [one.tolist() for one in theirs]
    # And it is the selector that chose them: the head alone would not have.
    alone = [(rows[1:] @ head(draft.config).t()).argmax(-1) for rows in hidden]
    assert [one.tolist() for one in ours] != [one.tolist() for one in alone]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("piece", [1, 2, 5])
def test_context_in_pieces_equals_context_at_once(tmp_path, case, piece):
    draft = load(tmp_path, CASES[case])
    assert apart(hidden_states(draft, piece=piece), hidden_states(draft)) < SAME


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("window", [21, 9])
def test_a_wrapped_ring_equals_one_that_never_wraps(tmp_path, case, window):
    draft = load(tmp_path, CASES[case])
    assert window + draft.config.block_size < TOTAL
    ours = hidden_states(draft, window=window, piece=window)
    assert apart(ours, _recomputed(draft, window=window)) < SAME


@pytest.mark.parametrize("case", CASES)
def test_a_gap_equals_a_context_that_never_had_those_rows(tmp_path, case):
    draft = load(tmp_path, CASES[case])
    skip = {0, 7, 8, 9, 21, 24, 30}
    assert apart(hidden_states(draft, skip=skip), _recomputed(draft, skip=skip)) < SAME
    assert apart(hidden_states(draft, skip=skip), hidden_states(draft)) > 1e-3


def _recomputed(draft, *, window=64, skip=()):
    """Each round with its context projected anew, into a ring that cannot wrap."""
    features, blocks = inputs(draft.config)
    base, found = 0, []
    for (new, width), block in zip(ROUNDS, blocks, strict=True):
        base += new
        context = DraftContext(draft.config, 1, 256, torch.float32)
        for at in range(max(0, base - window), base):
            if at not in skip:
                context.write(0, at, *draft.network.project_context(features[at : at + 1], at))
        with torch.inference_mode():
            found.append(draft.network.block(block, context.view(0, base, width, window)))
    return found


def test_both_dialects_of_one_draft_are_the_same_network(tmp_path):
    ours = load(tmp_path / "z", Z_LAB)
    theirs = load(tmp_path / "s", SPECULATORS)
    assert theirs.config.dialect == "speculators"
    assert theirs.config.target_layer_ids == ours.config.target_layer_ids
    assert apart(hidden_states(ours), hidden_states(theirs)) == 0.0


def test_bf16_follows_fp32_as_far_as_its_precision_goes(tmp_path):
    wide = hidden_states(load(tmp_path, CASES["sliding"]))
    narrow = hidden_states(load(tmp_path, CASES["sliding"], torch.bfloat16))
    assert all(rows.dtype == torch.bfloat16 for rows in narrow)
    assert 0 < apart(wide, [rows.float() for rows in narrow]) < 0.15
