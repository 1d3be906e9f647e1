"""Each draft head end to end: a tiny target and its draft in one process, over a real ring."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.real_pair import Checkpoints, real_pair
from support.right_drafts import following, right_dflash2, right_domino, right_dspark
from support.tiny_draft import DFLASH2, DOMINO, DSPARK
from support.tiny_pair import HIDDEN, VOCAB, write_pair

from protocol.checkpoints.draft_config import read_draft_config
from protocol.messages import Sampling

PROMPT = (5, 9, 17, 33, 65, 2, 4, 8, 16, 32, 64, 31)
TOKENS = 60
HEADS = {
    "dflash2": (DFLASH2, {"selector_rank": VOCAB, "selector_top_k": VOCAB}, right_dflash2),
    "domino": (
        DOMINO,
        {"gru_hidden_dim": HIDDEN, "emb_dim": VOCAB, "pure_draft_prefix_len": 0},
        right_domino,
    ),
    "dspark": (DSPARK, {"markov_rank": VOCAB}, right_dspark),
}
SAMPLED = Sampling(temperature=0.9, top_p=0.95, seed=11)


def pair(folders):
    return real_pair(Checkpoints(*folders), dtype="float32", exact=False, threads=1, context=64)


@pytest.fixture(scope="module", params=HEADS)
def random_head(request, tmp_path_factory):
    base, *_ = HEADS[request.param]
    with pair(write_pair(tmp_path_factory.mktemp(request.param), base=base)) as made:
        yield made


@pytest.mark.parametrize("sampling", [None, SAMPLED])
def test_a_random_head_leaves_the_text_as_it_is(random_head, sampling):
    plain = random_head.run(PROMPT, TOKENS, speculative=False, sampling=sampling)
    drafted = random_head.run(PROMPT, TOKENS, speculative=True, sampling=sampling)
    assert drafted.token_ids == plain.token_ids
    assert len(drafted.rounds) < TOKENS - 1  # it was asked, and now and then right
    assert len(set(drafted.proposed)) > 10


def forgetful(model: Path):
    """Let the target see its last token alone, so that what follows a token never changes."""
    path = model / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith("o_proj.weight"):
            tensor.zero_()
    save_file(tensors, path)
    return tensors["model.embed_tokens.weight"]


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_is_right_is_accepted_whole(tmp_path, name):
    base, options, right = HEADS[name]
    folders = write_pair(tmp_path, base=base, dflash_config=options)
    table = forgetful(folders[0])
    with pair(folders) as made:
        plain = made.run(PROMPT, TOKENS, speculative=False)
    config = read_draft_config(folders[1])
    after = following((PROMPT[-1], *plain.token_ids), VOCAB)
    assert torch.unique(after).numel() > 3  # no single token would do
    tensors = right(config, table, after)
    folders = write_pair(tmp_path, base=base, dflash_config=options, tensors=tensors)
    forgetful(folders[0])
    with pair(folders) as made:
        run = made.run(PROMPT, TOKENS, speculative=True)
    assert run.token_ids == plain.token_ids
    assert set(run.rounds[:-1]) == {config.max_proposals + 1}
