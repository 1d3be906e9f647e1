"""What a session hears of its draft besides answers. Pure."""

from launch.draft_side import DraftSide
from launch.events import DraftDown, DraftLate, DraftUp, Withdrawn
from launch.outstanding import Outstanding
from protocol.messages import IngestItem, ProposeItem


def hear(
    event: DraftUp | DraftDown | DraftLate | Withdrawn,
    draft: DraftSide,
    asked: Outstanding,
    emitted: int,
) -> bool:
    """Take it in; True when the round goes on without the block that it waited for."""
    match event:
        case DraftUp(facts):
            draft.arrive(facts, emitted)
        case DraftDown():
            draft.die(event)
        case DraftLate(number):
            asked.defer(number)  # its answer may still come
        case Withdrawn(number):
            item = asked.withdraw(number)
            if isinstance(item, IngestItem):
                draft.give_up(item.stop)
            return isinstance(item, ProposeItem)
    return False
