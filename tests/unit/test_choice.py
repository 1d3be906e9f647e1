"""The choice function is deterministic, per row, and greedy with ties to the lowest id."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.choice import best_ids, choose
from protocol.errors import NotFinite
from protocol.messages import Sampling

HISTORY = torch.tensor([1, 2, 3])


def test_each_row_chooses_its_largest_logit():
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, -1.0, 4.9], [-3.0, -2.0, -1.0]])
    assert choose(logits, 3, Sampling(), HISTORY).tolist() == [1, 0, 2]


@given(st.lists(st.integers(-2, 2), min_size=2, max_size=30))
def test_ties_go_to_the_lowest_id(values):
    logits = torch.tensor([values], dtype=torch.float32)
    assert choose(logits, 3, Sampling(), HISTORY).tolist() == [values.index(max(values))]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.8), Sampling(repetition_penalty=1.2)]
)
def test_logits_that_are_not_finite_choose_nothing(bad, sampling):
    logits = torch.zeros(3, 8)
    logits[1, 5] = bad
    with pytest.raises(NotFinite, match="position 4"):
        choose(logits, 3, sampling, HISTORY)


@pytest.mark.parametrize("split", [1, 2, 3])
def test_rows_chosen_together_equal_rows_chosen_alone(split):
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(5))
    whole = choose(logits, 3, Sampling(), HISTORY)
    head = choose(logits[:split], 3, Sampling(), HISTORY)
    tail = choose(logits[split:], 3 + split, Sampling(), torch.cat((HISTORY, head)))
    assert torch.equal(whole, torch.cat((head, tail)))
    assert whole.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan"), 0.0])
def test_the_fast_path_chooses_as_torch_does(dtype, special):
    logits = torch.randint(-3, 3, (20, 70), generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[::2, 11::9] = special
    strided = logits.t().contiguous().t()
    assert torch.equal(best_ids(logits), torch.argmax(logits, dim=-1))
    assert torch.equal(best_ids(strided), torch.argmax(logits, dim=-1))
