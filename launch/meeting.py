"""How two loaded daemons are brought together: the messages, and what must agree. Pure."""

from typing import Final

from launch.plan import Attach
from protocol.errors import ConfigError, DraftMismatch, ProtocolError, WireMismatch
from protocol.messages import WIRE_VERSION, DraftHello, Hello, Pair, Paired, TargetHello
from protocol.placement import Placement

LEAST_AGREEMENT: Final = 0.05  # a right draft that is weak has a quarter of them right


def check_hello(asked: Hello, answer: TargetHello | DraftHello, role: str) -> None:
    """Raise unless it answers this very Hello, in this wire version, with possible numbers."""
    if answer.wire_version != WIRE_VERSION:
        raise WireMismatch(
            f"the {role} daemon speaks wire version {answer.wire_version}, this supervisor "
            f"{WIRE_VERSION}"
        )
    if answer.nonce != asked.nonce:
        raise ProtocolError(f"the {role} daemon answered another Hello")
    if isinstance(answer, TargetHello):
        check_target(answer)


def check_target(target: TargetHello) -> None:
    """Raise ProtocolError for numbers that no request could run with."""
    least = {
        "slots": 1,
        "vocab_size": 1,
        "max_positions": 2,
        "prefill_chunk": 1,
        "max_width": 1,
        "ring_capacity": max(target.prefill_chunk, target.max_width) if target.taps else 0,
    }
    for name, number in least.items():
        if getattr(target, name) < number:
            found = getattr(target, name)
            raise ProtocolError(f"the target states {name} {found}; at least {number} is needed")


def check_served(attach: Attach | None, target: TargetHello) -> None:
    """Raise ConfigError where a target that runs already has another model than its clients."""
    for name in ("hidden_size", "num_layers"):
        expected, found = getattr(attach, name, 0), getattr(target, name)
        if expected not in (0, found):
            raise ConfigError(
                f"the target that runs has {name} {found}, the model of --model has {expected}"
            )


def check_pair(target: TargetHello, draft: DraftHello) -> None:
    """Raise DraftMismatch where what was loaded does not agree, with both values."""
    facts = (
        ("captures layers", target.taps, "reads", draft.target_layer_ids),
        ("has hidden size", target.hidden_size, "has", draft.hidden_size),
        ("masks with id", target.mask_token_id, "with", draft.mask_token_id),
    )
    for one, theirs, other, ours in facts:
        if theirs != ours:
            raise DraftMismatch(f"the target {one} {theirs}, the draft {other} {ours}")


def doubt(paired: Paired) -> str:
    """Why the draft may have been made for another target, by its first tokens; or nothing.

    The text is the target's own all the same; but no width and no patience will make it faster.
    """
    if paired.agreed >= LEAST_AGREEMENT * paired.compared:
        return ""
    return (
        f"wrong pair: of {paired.compared} first tokens on a fixed prompt the draft has "
        f"{paired.agreed} right; it was made for another model, is damaged, or is hardly trained"
    )


def pair_message(
    target: TargetHello, draft: DraftHello, placement: Placement, ring_address: str
) -> Pair:
    """What the draft needs to attach to the target's ring, embedding and head."""
    return Pair(
        target_life=target.target_life,
        draft_life=draft.draft_life,
        transport=placement.transport,
        address=ring_address,
        ring_nonce=target.nonce,
        slots=target.slots,
        ring_capacity=target.ring_capacity,
        dtype=target.dtype,
        hidden_size=target.hidden_size,
        padded_vocab_size=target.padded_vocab_size,
        vocab_size=target.vocab_size,
        embedding_scale=target.embedding_scale,
        logit_scale=target.logit_scale,
        logit_softcap=target.logit_softcap,
    )
