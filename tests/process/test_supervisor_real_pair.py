"""The supervisor over our own daemons, with tiny checkpoints."""

import os
import signal

import pytest
from support.gguf_drafts import write_llama_cpp
from support.supervised import Client, plan_for
from support.tiny_draft import DSPARK
from support.tiny_pair import write_pair

from launch.policy import AUTO
from launch.supervisor import Supervisor
from launch.token_ids import pack_ids
from protocol.messages import Submit

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

PROMPT = [5, 6, 7, 8, 9, 10, 11]
LONG = [3 + i * 7 % 90 for i in range(250)]  # three times the ring's capacity


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("real-pair"))


@pytest.fixture(scope="module")
def alone(folders):
    """The target's own texts, one token at a time."""
    with Supervisor(plan_for(folders[0])) as supervisor:
        supervisor.wait_ready()
        texts = {}
        for number, prompt in enumerate((PROMPT, LONG)):
            client = Client(supervisor, number).submit(prompt, 60).finish()
            assert client.finished.statistics.mode == "autoregressive"
            texts[tuple(prompt)] = client.tokens
        return texts


@pytest.fixture(scope="module")
def pair(folders):
    with Supervisor(plan_for(*folders)) as supervisor:
        supervisor.wait_ready()
        assert supervisor.describe().mode == "speculative"
        yield supervisor


@pytest.mark.parametrize("prompt", [PROMPT, LONG], ids=["short", "long"])
def test_the_text_of_the_pair_is_the_targets_own(pair, alone, prompt):
    client = Client(pair, 1).submit(prompt, 60).finish()
    figures = client.finished.statistics
    assert client.tokens == alone[tuple(prompt)]
    assert (figures.mode, figures.transport) == ("speculative", "shm")
    assert figures.num_drafts == sum(figures.acceptance_histogram) > 0
    assert figures.draft_seconds > 0
    assert figures.verify_seconds > 0
    assert figures.num_stale_replies == 0


def test_two_requests_at_once_and_a_cancel_in_the_seconds_prefill(pair, alone):
    first = Client(pair, 1).submit(PROMPT, 60)
    pair.run_until(lambda: len(first.pieces) > 2)
    second = Client(pair, 2).submit(LONG, 60)
    pair.run_until(lambda: len(second.progress) > 1)
    second.cancel()
    pair.run_until(lambda: first.done and second.done)
    assert second.finished.finish_reason == "cancelled"
    assert second.tokens == []
    assert first.tokens == alone[tuple(PROMPT)]
    assert pair.describe().running == 0


def test_two_requests_at_once_get_their_own_texts(pair, alone):
    clients = [Client(pair, n).submit(prompt, 60) for n, prompt in enumerate((PROMPT, LONG))]
    pair.run_until(lambda: all(client.done for client in clients))
    assert [client.tokens for client in clients] == list(alone.values())


def test_a_request_goes_on_where_another_left_its_state(pair, alone):
    Client(pair, 1).submit(LONG[:200], 9, retain=True).finish()
    client = Client(pair, 2).submit(LONG, 60, base_pos=len(LONG)).finish()
    assert client.tokens == alone[tuple(LONG)]
    assert client.finished.statistics.num_kept_tokens == 200


def test_a_stop_inside_a_block_leaves_the_daemons_where_the_text_ends(pair, alone):
    """Hints make blocks of six tokens; the ninth ends the text, and the next request goes on."""
    text, seen = alone[tuple(LONG)], []

    def find_stop(ids):
        left = 9 - len(seen)
        seen.extend(ids)
        return left if left <= len(ids) else None

    ended = Client(pair, 1)
    hints = tuple(enumerate(text))
    asked = {"request": 1, "prompt": pack_ids(LONG), "max_tokens": 60, "hints": hints}
    pair.submit(Submit(**asked, retain=True), ended._take, find_stop)
    ended.finish()
    assert ended.tokens == text[:9]
    assert len(seen) > 9  # the block went on behind the end
    known = [*LONG, *text[:9]]
    on = Client(pair, 2).submit(known, 40, base_pos=len(known)).finish()
    assert on.tokens == text[9:49]
    assert on.finished.statistics.num_kept_tokens == 258


def test_a_draft_that_agrees_with_nothing_is_called_a_wrong_pair(folders, alone):
    """Random weights: the text is the target's own, and the reason is no low acceptance."""
    with Supervisor(plan_for(*folders, golden=tuple(LONG[:36]))) as supervisor:
        supervisor.wait_ready()
        status = supervisor.describe()
        client = Client(supervisor, 1).submit(PROMPT, 60).finish()
    said = "wrong pair: of 28 first tokens on a fixed prompt the draft has "
    assert status.mode_reason.startswith(said)
    figures = client.finished.statistics
    assert (figures.mode, figures.mode_reason) == ("speculative", status.mode_reason)
    assert client.tokens == alone[tuple(PROMPT)]


def test_a_draft_with_a_head_of_its_own_serves_from_a_gguf_file(tmp_path, alone):
    target, folder = write_pair(tmp_path, base=DSPARK)
    draft = write_llama_cpp(folder, tmp_path / "draft.gguf")
    with Supervisor(plan_for(target, draft, widest=11)) as pair:
        pair.wait_ready()
        client = Client(pair, 1).submit(PROMPT, 60).finish()
        figures = client.finished.statistics
        assert client.tokens == alone[tuple(PROMPT)]
        assert (figures.mode, figures.num_draft_restarts) == ("speculative", 0)
        assert figures.num_drafts > 0
        assert max(len(piece.proposed) for piece in client.pieces) == 6 * 4  # every row predicts
        grown = Client(pair, 2).submit(PROMPT, 30, verify="tree", tree_budget=10).finish()
        assert grown.tokens == alone[tuple(PROMPT)][:30]
        assert grown.finished.statistics.num_trees > 0


@pytest.mark.fault
def test_a_request_survives_the_death_of_the_draft(folders, alone):
    with Supervisor(plan_for(*folders)) as supervisor:
        supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, 60)
        supervisor.run_until(lambda: len(client.pieces) > 3)
        os.kill(supervisor.describe().draft.pid, signal.SIGKILL)
        client.finish()
    assert client.tokens == alone[tuple(PROMPT)]
    assert client.finished.statistics.mode == "autoregressive"
    assert "SIGKILL" in client.finished.statistics.mode_reason


def test_a_text_longer_than_the_drafts_positions_goes_on_without_it_and_says_where(tmp_path, alone):
    pair = write_pair(tmp_path, max_position_embeddings=48)
    with Supervisor(plan_for(*pair)) as supervisor:
        supervisor.wait_ready()
        long = Client(supervisor, 1).submit(PROMPT, 60).finish()
        short = Client(supervisor, 2).submit(PROMPT, 20).finish()
        assert supervisor.describe().num_draft_restarts == 0
    assert long.tokens == alone[tuple(PROMPT)]
    assert long.finished.statistics.num_drafts > 0
    reason = "the text has come to position 47, and the draft takes 48 positions"
    assert long.finished.statistics.mode_reason == reason
    assert short.finished.statistics.mode == "speculative"


@pytest.mark.fault
def test_a_draft_without_its_weights_leaves_an_autoregressive_run_that_says_so(tmp_path, alone):
    target, draft = write_pair(tmp_path)
    (draft / "model.safetensors").unlink()
    with Supervisor(plan_for(target, draft)) as supervisor:
        supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, 60).finish()
    assert client.tokens == alone[tuple(PROMPT)]
    assert "model.safetensors" in client.finished.statistics.mode_reason


def test_ngrams_take_part_by_themselves_where_the_width_is_left_open(pair, alone):
    """Prompt and text behind it, twice over: the third time is a quotation."""
    known = [*PROMPT, *alone[tuple(PROMPT)]]
    asked = [*known, *known, *PROMPT]
    plain = Client(pair, 1).submit(asked, 40, block_width=1).finish()
    client = Client(pair, 2).submit(asked, 40, block_width=AUTO).finish()
    assert client.tokens == plain.tokens
    assert plain.finished.statistics.num_ngram_tokens == 0
    figures = client.finished.statistics
    assert figures.num_accepted_ngram_tokens > 0
    accepted = figures.num_accepted_tokens + figures.num_accepted_ngram_tokens
    assert 1 + figures.num_rounds + accepted == figures.completion_tokens
