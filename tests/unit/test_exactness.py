"""The probe of width invariance, on models whose rows are known to depend on the width."""

import pytest
import torch

from protocol.errors import ExactUnavailable
from target_daemon import exactness
from target_daemon.exactness import AttentionShape, Widths, settle

TOKENS = torch.arange(200)


class Model:
    """Rows are a function of token and position, plus `quirk(width, index)`."""

    def __init__(self, quirk):
        self.quirk = quirk
        self.widths = Widths()
        self.asked = 0

    def probe_rows(self, tokens, base):
        self.asked += 1
        width = len(tokens)
        position = torch.arange(base, base + width)
        noise = torch.tensor([float(self.quirk(width, index)) for index in range(width)])
        return torch.stack((tokens * 1.0, position * 1.0, noise), dim=1)

    def probe_attention(self):
        return AttentionShape(1, 2, 8, 1024, torch.float32)


def run(quirk, *, block=8, exact=True, coarse=False):
    return settle(Model(quirk), TOKENS, base=59, block=block, exact=exact, coarse=coarse)


def test_rows_that_never_differ_are_native():
    for exact in (False, True):
        widths, verdict = run(lambda width, index: 0, exact=exact)
        assert verdict.kind == "native"
        assert widths.least == 1
        assert widths.passes(1) == [(0, 1, 1)]


def test_a_narrow_outlier_is_padded_with_exact_and_reported_without():
    def quirk(width, index):
        return width < 3

    widths, verdict = run(quirk)
    assert (verdict.kind, widths.least, widths.narrow) == ("padded", 3, 8)
    assert widths.wide == (8, 16, 32)
    widths, verdict = run(quirk, exact=False)
    assert (verdict.kind, widths.least) == ("no", 1)
    assert "width 1 differ" in verdict.detail


def test_coarse_rounding_has_narrow_forwards_padded_and_prompt_chunks_left_whole():
    widths, verdict = run(lambda width, index: width < 3 or width > 8, exact=False, coarse=True)
    assert (verdict.kind, widths.least) == ("padded", 3)
    assert widths.passes(1) == [(0, 1, 3)]
    assert widths.passes(256) == [(0, 256, 256)]


@pytest.mark.parametrize(
    ("quirk", "block"),
    [(lambda width, index: index, 8), (lambda width, index: width > 12, 16)],
    ids=["place", "block"],
)
def test_coarse_rounding_that_no_padding_mends_is_reported_and_not_refused(quirk, block):
    widths, verdict = run(quirk, block=block, exact=False, coarse=True)
    assert (verdict.kind, widths.least) == ("no", 1)


def test_a_gap_in_the_middle_counts_up_to_the_reference():
    widths, _ = run(lambda width, index: width == 5)
    assert widths.least == 6


def test_a_width_whose_rows_depend_on_their_place_is_not_used():
    # At width 2 and 3, whoever stands first is computed otherwise; shifted rows show it.
    widths, verdict = run(lambda width, index: index % 2 if width in (2, 3) else 0)
    assert (verdict.kind, widths.least) == ("padded", 4)


def test_wide_forwards_are_cut_where_they_differ():
    widths, verdict = run(lambda width, index: width > 16, block=24)
    assert (widths.narrow, widths.wide) == (16, (16,))
    assert verdict.kind == "padded"
    assert widths.passes(24) == [(0, 16, 16), (16, 24, 8)]


@pytest.mark.parametrize("exact", [True, False])
def test_rows_behind_the_eighth_of_a_wide_forward_are_compared_as_well(exact):
    def quirk(width, index):
        return width == 11 and index > 7

    widths, verdict = run(quirk, block=16, exact=exact)
    assert verdict.kind == ("padded" if exact else "no")
    if exact:
        assert (widths.narrow, widths.wide) == (10, (10, 16, 32))


def test_forwards_are_cut_to_the_rows_that_attention_takes_together(monkeypatch):
    plain = exactness.attend_folded

    def attend(query, key, value, mask, scale):
        return plain(query, key, value, mask, scale) + (query.shape[2] == 22) * (key.shape[2] > 300)

    monkeypatch.setattr(exactness, "attend_folded", attend)  # 11 rows of 2 heads a group
    assert run(lambda width, index: 0, block=8)[1].kind == "native"
    widths, verdict = run(lambda width, index: 0, block=16)
    assert (verdict.kind, widths.narrow) == ("padded", 10)
    _, verdict = run(lambda width, index: 0, block=16, exact=False)
    assert (verdict.kind, "how many rows" in verdict.detail) == ("no", True)


def test_rows_that_depend_on_their_place_everywhere_cannot_be_exact():
    with pytest.raises(ExactUnavailable, match="its place among 8 rows"):
        run(lambda width, index: index)
    assert run(lambda width, index: index, exact=False)[1].kind == "no"


def test_attention_that_depends_on_the_length_cannot_be_exact(monkeypatch):
    plain = exactness.attend_folded
    monkeypatch.setattr(
        exactness, "attend_folded", lambda q, k, v, m, s: plain(q, k, v, m, s) + k.shape[2]
    )
    with pytest.raises(ExactUnavailable, match="length of the context"):
        run(lambda width, index: 0)
    _, verdict = run(lambda width, index: 0, exact=False)
    assert (verdict.kind, "length of the context" in verdict.detail) == ("no", True)


def test_the_smallest_multiple_that_keeps_the_bits_is_taken(monkeypatch):
    plain = exactness.attend_folded

    def attend(query, key, value, mask, scale):
        return plain(query, key, value, mask, scale) + (key.shape[2] % 512 != 0) * key.shape[2]

    monkeypatch.setattr(exactness, "attend_folded", attend)
    assert run(lambda width, index: 0)[0].key_multiple == 512


def test_passes_cover_every_row_once_and_pad_what_is_too_narrow():
    widths = Widths(least=2, narrow=8, wide=(8, 16, 32))
    assert widths.passes(1) == [(0, 1, 2)]
    assert widths.passes(8) == [(0, 8, 8)]
    assert widths.passes(9) == [(0, 9, 16)]
    assert widths.passes(33) == [(0, 32, 32), (32, 33, 2)]
    assert widths.passes(75) == [(0, 32, 32), (32, 64, 32), (64, 75, 16)]
    assert widths.passes(0) == []
    assert Widths().passes(1000) == [(0, 1000, 1000)]


def test_the_probe_is_short():
    model = Model(lambda width, index: width < 2)
    settle(model, TOKENS, base=59, block=8, exact=True)
    assert model.asked <= 40
    model = Model(lambda width, index: width < 2)
    settle(model, TOKENS, base=59, block=8, exact=False)
    assert model.asked <= 10


@pytest.mark.parametrize(("block", "most"), [(8, 60), (16, 60), (35, 80)])
def test_attention_is_asked_a_few_dozen_times(block, most, monkeypatch):
    plain, asked = exactness.attend_folded, []
    monkeypatch.setattr(exactness, "attend_folded", lambda *a: asked.append(1) or plain(*a))
    run(lambda width, index: 0, block=block)
    assert 30 < len(asked) <= most
