"""The gated delta rule against its own definition, in float64 and one number at a time."""

import pytest
import torch

from target_daemon.hybrid.delta import CHUNK, by_chunks, by_rows, convolve, unit

HEADS, KEY, VALUE = 3, 8, 6
NEAR = {"atol": 1e-5, "rtol": 1e-5}


def inputs(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    query, key = (unit(random(rows, HEADS, KEY)) for _ in range(2))
    decay = -torch.nn.functional.softplus(random(rows, HEADS))
    beta = random(rows, HEADS).sigmoid()
    return query, key, random(rows, HEADS, VALUE), decay, beta, random(HEADS, KEY, VALUE)


def defined(query, key, value, decay, beta, state):
    """As the paper writes it: every output and every state."""
    outputs, states, state = [], [], state.double()
    for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
        state = state.clone()
        for head in range(HEADS):
            own = state[head] * g[head].double().exp()
            error = v[head].double() - k[head].double() @ own
            state[head] = own + torch.outer(k[head].double(), b[head].double() * error)
        outputs.append(torch.stack([q[h].double() @ state[h] for h in range(HEADS)]))
        states.append(state)
    return torch.stack(outputs).float(), torch.stack(states).float()


@pytest.mark.parametrize("rows", [1, 2, 7, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
def test_both_forms_are_the_rule(rows):
    given = inputs(rows)
    outputs, states = defined(*given)
    before = given[-1].clone()
    for form in (lambda *each: by_rows(*each, None), by_chunks):
        out, last = form(*given)
        torch.testing.assert_close(out, outputs, **NEAR)
        torch.testing.assert_close(last, states[-1], **NEAR)
    assert torch.equal(given[-1], before)


def test_the_state_after_each_row_is_kept_and_no_row_depends_on_those_behind_it():
    given = inputs(9)
    _, states = defined(*given)
    steps = torch.empty(9, HEADS, KEY, VALUE)
    out, last = by_rows(*given, steps)
    torch.testing.assert_close(steps, states, **NEAR)
    assert torch.equal(last, steps[-1])
    assert last.data_ptr() != steps[-1].data_ptr()
    few = [each[:4] for each in given[:-1]]
    assert torch.equal(by_rows(*few, given[-1], None)[0], out[:4])
    assert torch.equal(by_rows(*few, given[-1], None)[1], steps[3])


def test_the_convolution_is_causal_and_each_row_is_a_sum_of_its_own():
    generator = torch.Generator().manual_seed(1)
    rows, taps = (torch.randn(n, 5, generator=generator) for n in (3 + 6, 4))
    out = convolve(rows, taps, 6)
    plain = torch.nn.functional.conv1d(rows.t()[None], taps.t()[:, None], groups=5)[0].t()
    torch.testing.assert_close(out, torch.nn.functional.silu(plain), **NEAR)
    assert torch.equal(convolve(rows[2:6], taps, 1), out[2:3])
