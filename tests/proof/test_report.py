"""The stored walks and `docs/proof.json`, without any model."""

import json
import shutil

import pytest
from support import proof_reference, proof_report
from support.proof_prompts import MAX_TOKENS
from support.proof_reference import Walk, cut, read_walks, write_walks
from support.proofs import Difference, Outcome

PROOFS = {
    "lossless_float32_exact",
    "lossless_float32_exact_two_daemons",
    "sampled_float32_exact",
    "trees_float32_exact",
    "lossless_float32",
    "acceptance_equals_reference",
    "lossless_bfloat16_exact",
    "lossless_bfloat16",
}
NARROW = Difference("p", 3, 1e-4, "target", (1, 2))
WIDE = Difference("p", 3, 2e-3, "draft", None)


def outcome(**facts):
    given = {"claim": "c", "run": 2, "identical": 2, "required": 2, "exact": "padded"}
    return Outcome(**{**given, **facts})


@pytest.mark.parametrize(
    ("facts", "holds"),
    [
        ({}, True),
        ({"run": 0, "identical": 0, "required": 0}, False),
        ({"identical": 1}, False),
        ({"identical": 1, "required": 1, "differences": [NARROW]}, True),
        ({"identical": 1, "required": 1, "differences": [WIDE]}, False),
    ],
)
def test_a_proof_holds_with_enough_prompts_and_no_wide_gap(facts, holds):
    assert outcome(**facts).holds is holds
    assert outcome(**facts).record()["holds"] is holds


@pytest.mark.parametrize(
    ("rounds", "total", "kept"),
    [((2, 3, 1), 6, (2, 3, 1)), ((2, 3, 1), 5, (2, 3)), ((2, 3, 1), 4, (2, 2)), ((), 3, ())],
)
def test_a_walk_is_cut_where_the_reference_has_no_token_left(rounds, total, kept):
    assert cut(rounds, total) == kept


def test_walks_are_read_as_they_were_written(tmp_path, monkeypatch):
    monkeypatch.setattr(proof_reference, "STORE", tmp_path / "walks.json")
    walks = {"a": Walk("0f", (1, 2, 3), (2,)), "b": Walk("1e", (4,), ())}
    write_walks(walks, {"dflash": "0.1.0"})
    assert read_walks() == walks


def test_the_stored_walks_are_whole_and_name_the_package_that_made_them():
    stored = json.loads(proof_reference.STORE.read_text())
    assert stored["versions"]["dflash"] == "0.1.0"
    walks = read_walks()
    assert sum(not name.startswith("own-") for name in walks) == 48
    for name, walk in walks.items():
        most = MAX_TOKENS["own" if name.startswith("own-") else "public"] - 1
        assert sum(walk.rounds) == len(walk.token_ids) - 1 < most
        assert all(1 <= count <= 8 for count in walk.rounds)


def copy_code(tmp_path):
    for name in proof_report.FOLDERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "code.py").write_text("ONE = 1\n")
    (tmp_path / "docs").mkdir()
    return tmp_path / "docs" / "proof.json"


def test_a_report_is_older_than_code_that_changed_after_it(tmp_path):
    report = copy_code(tmp_path)
    assert "not written yet" in proof_report.stale(report, tmp_path)
    report.write_text(json.dumps({"code": proof_report.digests(tmp_path)}))
    assert proof_report.stale(report, tmp_path) == ""
    (tmp_path / "launch" / "code.py").write_text("ONE = 2\n")
    (tmp_path / "protocol" / "more.py").write_text("")
    said = proof_report.stale(report, tmp_path)
    assert said == "proof.json is older than the code in protocol, launch: run `make proof`"
    shutil.rmtree(tmp_path / "launch")
    assert "launch" in proof_report.stale(report, tmp_path)


def test_a_report_states_commit_code_machine_and_every_difference_of_every_part(tmp_path):
    report = copy_code(tmp_path)
    proof_report.keep("first", {"one": outcome(differences=[NARROW])}, 12.3, tmp_path)
    proof_report.keep("second", {"two": outcome()}, 2.6, tmp_path)
    proof_report.write(proof_report.kept(tmp_path), report)
    found = json.loads(report.read_text())
    assert proof_report.stale(report, tmp_path) == ""
    assert found["machine"]["libraries"]["torch"]
    assert found["machine"]["cores"] >= 1
    assert found["seconds"] == 15
    assert set(found["proofs"]) == {"one", "two"}
    (difference,) = found["proofs"]["one"]["differences"]
    assert difference["logit_gap"] == 1e-4


def test_a_part_is_kept_as_long_as_the_code_is_the_same(tmp_path):
    copy_code(tmp_path)
    assert proof_report.kept(tmp_path) == {}
    proof_report.keep("first", {"one": outcome()}, 1.0, tmp_path)
    assert set(proof_report.kept(tmp_path)) == {"first"}
    (tmp_path / "launch" / "code.py").write_text("ONE = 2\n")
    assert proof_report.kept(tmp_path) == {}


def test_the_report_of_this_repository_holds():
    if not proof_report.REPORT.exists():
        pytest.skip("docs/proof.json is not written yet: run `make proof`")
    report = json.loads(proof_report.REPORT.read_text())
    # A report of older code knows less, and the summary of the tests says that it is old.
    assert set(report["proofs"]) == PROOFS or proof_report.stale()
    assert set(report["proofs"]) <= PROOFS
    assert all(found["holds"] for found in report["proofs"].values())
    for name in ("lossless_float32_exact", "lossless_float32", "acceptance_equals_reference"):
        assert report["proofs"][name]["run"] == 48
    assert report["proofs"]["acceptance_equals_reference"]["identical"] >= 46
