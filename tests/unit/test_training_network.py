"""The network that is trained: the draft's own numbers, and the gradients of a plain loop."""

import math

import pytest
import torch
from support.tiny_draft import Z_LAB, uniform, write_draft

from draft_daemon.checkpoint import load_draft
from draft_daemon.context import DraftContext
from draft_daemon.training.attention import NEVER, Span, attend_jointly, span
from draft_daemon.training.loss import Wanted, weighted_loss
from draft_daemon.training.network import Blocks, Network
from protocol.checkpoints.draft_config import read_draft_config, shipped_draft
from protocol.checkpoints.tensors import open_draft
from protocol.errors import UnsupportedModel


def trainable(folder):
    """The checkpoint in `folder` as the module that is trained."""
    config = read_draft_config(folder)
    network = Network(config, 200)
    with open_draft(folder) as source:
        weights = {name: source.get(name).float() for name in network.state_dict()}
    network.load_state_dict(weights)
    return network, config


def by_inference(folder, features, embedded, anchors):
    """What the draft daemon computes: one block after the other, over a ring."""
    draft = load_draft(folder, torch.float32)
    context = DraftContext(draft.config, 1, 128, torch.float32)
    found = []
    with torch.inference_mode():
        for block, anchor in zip(embedded, anchors.tolist(), strict=True):
            context.reset(0)
            context.write(0, 0, *draft.network.project_context(features[:anchor], 0))
            found.append(draft.network.block(block, context.view(0, anchor, len(block), 128)))
    return torch.stack(found)


@pytest.mark.parametrize("which", ["shipped", "tiny"])
def test_it_computes_what_the_draft_daemon_computes(which, tmp_path):
    folder = shipped_draft("smollm2-135m-dflash") if which == "shipped" else write_draft(tmp_path)
    network, config = trainable(folder)
    counts, anchors = (40, 23), torch.tensor([7, 20, 39, 1, 22])
    features = [uniform((count, config.feature_width), count) for count in counts]
    embedded = uniform((5, config.block_size, config.hidden_size), 5)
    spans = (
        span(slice(0, 40), slice(0, 3), anchors[:3]),
        span(slice(40, 63), slice(3, 5), anchors[3:]),
    )
    positions = torch.cat([torch.arange(count) for count in counts])
    with torch.no_grad():
        found = network(torch.cat(features), positions, Blocks(embedded, anchors, spans))
    for part, rows in ((slice(0, 3), features[0]), (slice(3, 5), features[1])):
        expected = by_inference(folder, rows, embedded[part], anchors[part])
        torch.testing.assert_close(found[part], expected, rtol=2e-4, atol=2e-4)


def test_rows_that_are_not_there_are_those_of_a_narrower_block(tmp_path):
    folder = write_draft(tmp_path)
    network, config = trainable(folder)
    features = uniform((30, config.feature_width), 1)
    embedded = uniform((1, config.block_size, config.hidden_size), 2)
    beyond = torch.zeros(1, 1, config.block_size)
    beyond[..., 3:] = NEVER
    anchors = torch.tensor([30])
    blocks = Blocks(embedded, anchors, (Span(slice(0, 30), slice(0, 1), None, beyond),))
    with torch.no_grad():
        found = network(features, torch.arange(30), blocks)[:, :3]
    expected = by_inference(folder, features, embedded[:, :3], anchors)
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


def plain_attention(query, context, own, anchors):
    """Row by row and head by head, each with the keys that it sees, in a list."""
    blocks, width, heads, dim = query.shape
    group = heads // context[0].shape[1]
    rows = []
    for block in range(blocks):
        for slot in range(width):
            for head in range(heads):
                kv = head // group
                keys = torch.cat((context[0][: anchors[block], kv], own[0][block, :, kv]))
                values = torch.cat((context[1][: anchors[block], kv], own[1][block, :, kv]))
                scores = keys @ query[block, slot, head] / math.sqrt(dim)
                rows.append(scores.softmax(0) @ values)
    return torch.stack(rows).view(blocks, width, heads * dim)


def test_gradients_of_block_attention_are_those_of_a_plain_loop():
    shapes = {"query": (3, 4, 6, 8), "rows": (9, 2, 8), "own": (3, 4, 2, 8)}
    torch.manual_seed(3)
    leaves = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in (shapes["query"], *[shapes["rows"]] * 2, *[shapes["own"]] * 2)
    ]
    anchors = torch.tensor([2, 9, 5])
    weight = torch.randn(3, 4, 48, dtype=torch.float64)
    query, keys, values, own_keys, own_values = leaves
    part = span(slice(0, 9), slice(0, 3), anchors)
    ours = attend_jointly(query, (keys, values), (own_keys, own_values), part)
    plain = plain_attention(query, (keys, values), (own_keys, own_values), anchors)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad((ours * weight).sum(), leaves)
    expected = torch.autograd.grad((plain * weight).sum(), leaves)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def wanted_of(rows, columns, count):
    source = torch.Generator().manual_seed(rows)
    shares = torch.rand(rows, count, generator=source)
    picked = torch.stack([torch.randperm(columns, generator=source)[:count] for _ in range(rows)])
    return Wanted(picked, shares / shares.sum(1, keepdim=True), torch.rand(rows, generator=source))


@pytest.mark.parametrize("chunk", [1 << 24, 150])
def test_the_loss_and_its_gradient_are_those_of_log_softmax(chunk, monkeypatch):
    monkeypatch.setattr("draft_daemon.training.loss.CHUNK_ELEMENTS", chunk)
    head, offset = torch.randn(50, 16), torch.randn(50)
    hidden = torch.randn(7, 16, requires_grad=True)
    wanted = wanted_of(7, 50, 3)
    loss, right = weighted_loss(hidden, head, offset, wanted)
    logits = hidden @ head.T + offset
    logs = logits.log_softmax(1).gather(1, wanted.columns)
    plain = -((logs * wanted.shares).sum(1) * wanted.weights).sum()
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-5)
    assert right.tolist() == logits.argmax(1).eq(wanted.columns[:, 0]).tolist()
    (found,) = torch.autograd.grad(2 * loss, hidden)
    (expected,) = torch.autograd.grad(2 * plain, hidden)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_layers_with_a_window_are_refused(tmp_path):
    raw = Z_LAB | {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "use_sliding_window": True,
    }
    config = read_draft_config(write_draft(tmp_path, raw))
    with pytest.raises(UnsupportedModel, match="are not trained"):
        Network(config, 10)
