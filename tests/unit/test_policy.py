"""How wide a block is."""

import pytest

from launch.policy import FullWidth


@pytest.mark.parametrize(
    ("block_size", "budget", "width"), [(16, 100, 16), (16, 3, 3), (1, 9, 1), (16, 1, 1), (8, 0, 1)]
)
def test_full_width_is_the_block_or_what_is_still_wanted(block_size, budget, width):
    assert FullWidth().width(block_size=block_size, budget=budget) == width
