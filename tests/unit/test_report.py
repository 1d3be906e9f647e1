"""The closing figures: public names, the rates they imply, and the one line for people."""

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from launch.commands.report import Report, build, summary
from protocol.messages import Sampling, Statistics, TokenLogprobs

STATISTICS = Statistics(
    prompt_tokens=10,
    completion_tokens=7,
    mode="speculative",
    mode_reason="",
    transport="shm",
    exact="padded",
    time_to_first_token_seconds=0.5,
    prefill_seconds=0.25,
    decode_seconds=2.0,
    draft_seconds=0.5,
    ingest_seconds=0.25,
    verify_seconds=1.0,
    overhead_seconds=0.25,
    num_rounds=4,
    num_drafts=3,
    num_draft_tokens=12,
    num_accepted_tokens=2,
    acceptance_histogram=(1, 2, 0, 0, 0),
    num_accepted_tokens_per_pos=(2, 0, 0, 0),
    num_proposed_tokens_per_pos=(3, 3, 3, 3),
    num_stale_replies=0,
)


ENTRIES = tuple(
    TokenLogprobs(logprob=-float(n), ids=(n, 9), logprobs=(-float(n), -9.0)) for n in (1, 2, 3)
)


WARM = Sampling(seed=11, temperature=0.5)


def _report(sampling=WARM, logprobs=(), **changes):
    return build(
        text="abc",
        token_ids=(1, 2, 3),
        finish_reason="stop",
        statistics=msgspec.structs.replace(STATISTICS, **changes),
        load_seconds=1.5,
        sampling=sampling,
        logprobs=logprobs,
    )


def _names(struct):
    """All names of a struct, of the structs inside it, and of those in its tuples."""
    found = []
    for field in msgspec.structs.fields(struct):
        found.append(field.name)
        parts = [field.type, *get_args(field.type), *map(get_args, get_args(field.type))]
        for part in parts:
            for one in part if isinstance(part, tuple) else (part,):
                if isinstance(one, type) and issubclass(one, msgspec.Struct):
                    found += _names(one)
    return found


def test_no_figure_of_a_request_is_left_out():
    assert set(Statistics.__struct_fields__) <= set(_names(Report))


def test_the_readme_names_what_json_prints_and_nothing_else():
    text = (Path(__file__).parents[2] / "README.md").read_text()
    block = text.split("`--json` prints one object:")[1].split("```")[1].removeprefix("text\n")
    values = {one for field in msgspec.structs.fields(Report) for one in get_args(field.type)}
    said = [word for word in re.findall(r"[a-z_]+", block) if word not in values | {"null"}]
    assert sorted(said) == sorted(_names(Report))


def test_rates_follow_from_the_counts():
    report = _report()
    assert report.timings.tokens_per_second == pytest.approx(6 / 2.0)
    assert report.speculative_decoding.mean_acceptance_length == pytest.approx((3 + 2) / 3)
    assert report.speculative_decoding.draft_acceptance_rate == pytest.approx(2 / 12)
    assert report.timings.load_seconds == 1.5


def test_what_was_never_drafted_has_no_rate():
    report = _report(num_drafts=0, num_draft_tokens=0, num_accepted_tokens=0)
    assert report.speculative_decoding.mean_acceptance_length is None
    assert report.speculative_decoding.draft_acceptance_rate is None


def test_a_request_that_ended_before_its_second_token_has_no_speed():
    for count in (0, 1):
        report = _report(completion_tokens=count, decode_seconds=0.0)
        assert report.timings.tokens_per_second == 0.0


def test_the_line_names_counts_speed_mode_acceptance_transport_and_exactness():
    assert summary(_report()) == (
        "7 tokens (stop) | 3.0 tokens/s | first token 0.50 s | load 1.5 s | speculative | "
        "1.67 tokens/round, 17% of drafts accepted | seed 11 | transport shm | exact: padded"
    )


def test_the_line_says_why_there_was_no_draft():
    line = summary(
        _report(
            mode="autoregressive",
            mode_reason="no draft was asked for",
            num_drafts=0,
            num_draft_tokens=0,
            transport="",
        )
    )
    assert "autoregressive (no draft was asked for)" in line
    assert "round" not in line
    assert "transport" not in line


def test_what_was_kept_of_the_prompt_is_told_where_there_is_something():
    assert "1,200 tokens of the prompt kept" in summary(_report(num_kept_tokens=1200))
    assert "kept" not in summary(_report())


def test_the_seed_is_told_where_it_mattered():
    assert _report().seed == 11
    assert "seed" not in summary(_report(sampling=Sampling(seed=11)))


def test_logprobs_are_listed_by_token_where_they_were_asked_for():
    assert _report(logprobs=ENTRIES).logprobs is None
    report = _report(sampling=Sampling(logprobs=2), logprobs=ENTRIES)
    assert [entry.token_id for entry in report.logprobs] == [1, 2, 3]
    assert msgspec.json.decode(msgspec.json.encode(report.logprobs[1])) == {
        "token_id": 2,
        "logprob": -2.0,
        "top": [{"token_id": 2, "logprob": -2.0}, {"token_id": 9, "logprob": -9.0}],
    }


def test_guesses_count_as_proposals_of_a_round_and_not_as_the_drafts():
    report = _report(
        num_draft_tokens=0,
        num_accepted_tokens=0,
        num_hint_tokens=4,
        num_accepted_hint_tokens=3,
        num_ngram_tokens=2,
        num_accepted_ngram_tokens=1,
    )
    assert report.speculative_decoding.mean_acceptance_length == pytest.approx((3 + 4) / 3)
    assert report.speculative_decoding.draft_acceptance_rate is None
    assert "2.33 tokens/round, 50% of 2 from n-grams |" in summary(report)


def test_what_went_wrong_is_in_the_report_and_restarts_are_in_the_line():
    report = _report(
        num_draft_restarts=2, num_target_restarts=1, num_late_proposals=3, num_stale_replies=4
    )
    assert msgspec.to_builtins(report.faults) == {
        "num_draft_restarts": 2,
        "num_target_restarts": 1,
        "num_replay_mismatches": 0,
        "num_late_proposals": 3,
        "num_stale_replies": 4,
    }
    assert "target restarted 1x | draft restarted 2x" in summary(report)
    assert "restarted" not in summary(_report())
