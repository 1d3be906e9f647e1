from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import messages as generated

from protocol import messages, state
from protocol.errors import ProtocolError
from protocol.state import LEGAL, Phase, advance, diagram

PROTOCOL_MD = Path(__file__).parents[2] / "docs" / "protocol.md"
LINKS = ("target", "draft")
M = messages

LIVES = {
    "target": [
        *(M.Open, M.Opened, M.Prefill, M.Prefilled, M.Replay, M.Replayed),
        *(M.Verify, M.Verified, M.Close, M.Closed),
    ],
    "draft": [M.Open, M.Opened, M.Ingest, M.Ingested, M.Propose, M.Proposed, M.Close, M.Closed],
}


@pytest.mark.parametrize("link", LINKS)
def test_one_request_goes_from_new_to_closed(link):
    phase = Phase.NEW
    for message in LIVES[link]:
        phase = advance(link, phase, message, sequence=1)
    assert phase is Phase.CLOSED


@pytest.mark.parametrize("link", LINKS)
def test_a_close_that_overtakes_an_answer_still_ends_closed(link):
    calls = LIVES[link][:-2]
    for request, reply in zip(calls[::2], calls[1::2], strict=True):
        busy = next(after for (_, kind), after in LEGAL[link].items() if kind is request)
        for answer in (reply, M.ItemFailed, M.Failed):
            phase = advance(link, busy, M.Close, sequence=1)
            phase = advance(link, phase, answer, sequence=1)
            assert advance(link, phase, M.Closed, sequence=1) is Phase.CLOSED


@pytest.mark.parametrize("link", LINKS)
@given(data=st.data())
def test_whatever_is_not_in_the_table_raises_with_request_state_and_message(link, data):
    phase = data.draw(st.sampled_from(list(Phase)))
    kind = data.draw(st.sampled_from([*generated.message_classes(), M.ItemFailed]))
    known = M.ItemFailed if kind is M.Failed else kind
    if (phase, known) in LEGAL[link]:
        assert isinstance(advance(link, phase, kind, sequence=5), Phase)
        return
    with pytest.raises(ProtocolError) as caught:
        advance(link, phase, kind, sequence=5)
    for word in ("sequence 5", phase.value, kind.__name__, link):
        assert word in str(caught.value)


@pytest.mark.parametrize("link", LINKS)
def test_every_phase_can_be_reached_and_can_end(link):
    table = LEGAL[link]
    reached = {Phase.NEW}
    for _ in Phase:
        reached |= {after for (before, _), after in table.items() if before in reached}
    used = {before for before, _ in table} | set(table.values())
    assert reached == used
    ending = {Phase.CLOSED}
    for _ in Phase:
        ending |= {before for (before, _), after in table.items() if after in ending}
    assert ending == used


@pytest.mark.parametrize("link", LINKS)
def test_the_table_names_only_messages_of_its_link(link):
    legal = {kind for _, kind in LEGAL[link]}
    requests, replies = {
        "target": (state.TARGET_REQUESTS, state.TARGET_REPLIES),
        "draft": (state.DRAFT_REQUESTS, state.DRAFT_REPLIES),
    }[link]
    assert legal <= {*requests, *replies, M.ItemFailed}
    # Meeting, pairing and the refusal of a whole message belong to no sequence.
    whole = {M.Hello, M.Pair, M.TargetHello, M.DraftHello, M.Paired, M.Failed}
    assert {*requests, *replies} - whole <= legal


def test_every_message_belongs_to_a_link():
    unions = (
        state.TargetRequest,
        state.DraftRequest,
        state.TargetReply,
        state.DraftReply,
        state.FeatureRequest,
        state.FeatureReply,
        state.ClientRequest,
        state.ClientReply,
    )
    to_the_server_itself = {M.Leave}  # of either daemon: it ends it
    assert {kind for union in unions for kind in get_args(union)} | to_the_server_itself == set(
        generated.message_classes()
    )


@pytest.mark.parametrize("link", LINKS)
def test_the_document_holds_the_diagram_of_the_table(link):
    assert f"```mermaid\n{diagram(link)}\n```" in PROTOCOL_MD.read_text(encoding="utf-8")


def test_the_document_lists_every_message_and_item_and_the_wire_version():
    text = PROTOCOL_MD.read_text(encoding="utf-8")
    assert f"wire version **{messages.WIRE_VERSION}**" in text
    for kind in [*generated.message_classes(), *generated.item_classes()]:
        assert f"| `{kind.__name__}` |" in text


def test_the_document_says_of_each_message_what_the_code_says():
    text = PROTOCOL_MD.read_text(encoding="utf-8")
    for kind in [*generated.message_classes(), *generated.item_classes()]:
        fields = [f for f in kind.__struct_fields__ if f not in ("target_life", "draft_life")]
        if issubclass(kind, M.Item):
            fields = [f for f in fields if f not in ("sequence", "round")]
        row = next(line for line in text.splitlines() if line.startswith(f"| `{kind.__name__}` |"))
        for field in fields:
            assert f"`{field}`" in row, f"{kind.__name__}.{field}"
