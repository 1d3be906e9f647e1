"""Real daemons that meet over a network, with keys, and are driven under a lease."""

import pytest
from support.drive import unpack
from support.far_pair import LIVES, NONCE, FarPair
from support.keys import keyring
from support.local_pair import LocalPair
from support.tiny_pair import VOCAB, write_pair
from support.waiting import until

from protocol.client import Poller
from protocol.errors import DeadlineExceeded, FeatureExpired, NotTheDriver
from protocol.messages import (
    WIRE_VERSION,
    Attach,
    Attached,
    Close,
    CloseItem,
    Failed,
    Hello,
    Ingest,
    IngestItem,
    Rows,
    Verify,
    VerifyItem,
)
from protocol.state import FEATURE_REPLIES
from protocol.transports.local import TRANSPORT as LOCAL

pytestmark = pytest.mark.process

PROMPT = [(7 * i) % (VOCAB - 4) + 4 for i in range(30)]
ROUNDS = 6


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def pair(checkpoints, tmp_path_factory):
    """One pair of processes for all tests here, on IPv6; the last test ends its target."""
    model, draft = checkpoints
    folder = tmp_path_factory.mktemp("far")
    with FarPair(folder, model, draft, host="::1", drafted={"target_model": str(model)}) as pair:
        yield pair


def test_rows_are_pulled_and_the_draft_proposes_as_with_shared_memory(
    pair, checkpoints, runtime_dir
):
    target, draft, paired = pair.meet()
    assert (target.host.listens, draft.host.listens) == (
        pair.address("target"),
        pair.address("draft"),
    )
    assert (paired.transport, paired.mapped_bytes) == ("tcp", 0)
    text, proposed = pair.generate(1, PROMPT, ROUNDS)
    with LocalPair(runtime_dir, *checkpoints) as local:
        expected, theirs = local.generate(local.draft(LOCAL), PROMPT, ROUNDS)
    assert text == expected
    assert [unpack(item.tokens) for item in proposed] == [unpack(item.tokens) for item in theirs]
    row = len(target.taps) * target.hidden_size * 4  # float32
    for item, rows in zip(proposed, [len(PROMPT)] + [1] * (ROUNDS - 1), strict=True):
        assert item.moved_bytes > rows * row


def test_rows_of_a_closed_sequence_are_expired_and_the_next_one_is_served(pair):
    pair.meet()
    pair.open(11)
    pair.prefill(11, PROMPT)
    pair.one("target", Close, CloseItem(sequence=11))
    with pytest.raises(FeatureExpired):
        pair.one("draft", Ingest, IngestItem(sequence=11, stop=len(PROMPT)))
    pair.one("draft", Close, CloseItem(sequence=11))
    text, _ = pair.generate(12, PROMPT, 2)
    assert len(text) >= 3


def test_a_draft_may_pull_rows_and_nothing_else(pair):
    target, lives = pair.hello("target"), {"target_life": LIVES["target_life"]}
    attach = Attach(
        **lives,
        wire_version=WIRE_VERSION,
        nonce=NONCE,
        slots=target.slots,
        ring_capacity=target.ring_capacity,
        row_width=len(target.taps) * target.hidden_size,
        dtype=target.dtype,
    )
    rows = Rows(**lives, pull=1, slot=0, sequence=99, start=0, count=1)
    verify = Verify(**lives, items=(VerifyItem(sequence=1, base_pos=0, tokens=b"", budget=1),))
    with Poller() as poller:
        link = poller.connect(pair.address("target"), FEATURE_REPLIES, keyring=keyring("draft"))

        def ask(message):
            link.send(message)
            return until(lambda: poller.poll(0.05) and link.receive(), what="an answer")[0]

        assert ask(rows).code == "protocol"  # before Attach
        assert isinstance(ask(attach), Attached)
        assert ask(rows).code == "feature_expired"
        refused = ask(verify)
        assert isinstance(refused, Failed)
        assert (refused.code, refused.detail) == ("permission", "a draft may not send Verify here")


def test_another_supervisor_waits_for_the_lease(pair):
    pair.hello("target")
    other = Hello(
        target_life=LIVES["target_life"] + 1, wire_version=WIRE_VERSION, nonce=1, owner=99
    )
    with pytest.raises(NotTheDriver, match=r"its lease ends in \d"):
        pair.ask("target", other)
    pair.hello("target")  # the first one drives on


def test_a_target_that_is_gone_costs_a_deadline_and_its_next_life_is_another(pair):
    pair.meet()
    pair.open(13)
    pair.prefill(13, PROMPT)
    pair.services["target"].kill()
    with pytest.raises(DeadlineExceeded, match=r"no answer to Rows.* cannot be reached"):
        pair.one("draft", Ingest, IngestItem(sequence=13, stop=len(PROMPT)))
    pair.services["target"].log.write_text("")
    pair.services["target"].start().until_ready()
    hello = Hello(target_life=LIVES["target_life"] + 1, wire_version=WIRE_VERSION, nonce=NONCE)
    pair.ask("target", hello)
    with pytest.raises(FeatureExpired):
        pair.one("draft", Ingest, IngestItem(sequence=13, stop=len(PROMPT)))
    pair.services["target"].end()  # this test started it
