"""Taps to ring rows: place, order, and what can be taken back."""

import pytest
import torch
from support.plain_host import PlainHost

from protocol.errors import ConfigError
from target_daemon.capture import open_capture

HIDDEN = 3


def make(taps=(2, 0), window=4, widest=4):
    return open_capture(
        PlainHost(),
        taps=taps,
        num_layers=4,
        hidden_size=HIDDEN,
        slots=2,
        window=window,
        widest_forward=widest,
        dtype=torch.float32,
    )


def rows(value, count):
    return torch.full((count, HIDDEN), float(value))


def test_columns_follow_the_order_of_the_taps():
    capture, ring = make()
    capture.begin(1, 0, 2)
    capture.take(0, rows(10, 2))
    capture.take(2, rows(12, 2))
    assert ring.rows[1, :2].tolist() == [[12.0] * HIDDEN + [10.0] * HIDDEN] * 2
    assert not ring.rows[0].any()


def test_rows_wrap_at_the_capacity_and_padding_is_left_out():
    capture, ring = make()
    capture.begin(0, 6, 4)
    hidden = torch.arange(6 * HIDDEN, dtype=torch.float32).view(6, HIDDEN)
    capture.take(2, hidden)
    for index, row in enumerate((6, 7, 0, 1)):
        assert torch.equal(ring.rows[0, row, :HIDDEN], hidden[index])
    assert not ring.rows[0, 2:6].any()


def test_the_height_is_raised_before_a_row_is_written_and_never_lowered():
    capture, ring = make()
    capture.begin(0, 4, 4)
    assert ring.written_high.tolist() == [8, 0]
    assert not ring.rows.any()
    capture.begin(0, 5, 1)
    assert ring.written_high.tolist() == [8, 0]


def test_nothing_is_written_while_paused():
    capture, ring = make()
    with capture.paused():
        assert capture.columns == {}
        capture.begin(0, 0, 100)
    assert set(capture.columns) == {0, 2}
    assert not ring.written_high.any()


def test_without_taps_only_the_height_is_kept():
    capture, ring = make(taps=())
    capture.begin(0, 0, 4)
    assert ring.written_high.tolist() == [4, 0]


@pytest.mark.parametrize("taps", [(4,), (-1,), (0, 0)])
def test_taps_must_be_distinct_layers(taps):
    with pytest.raises(ConfigError, match=r"distinct layers in 0\.\.3"):
        make(taps=taps)
