"""What the reference package's own loop did on the proofs' prompts, stored and read.

The stored run is that loop, unmodified, with one token less than ours may emit. Its width is
``min(block, max_length - start)``, which counts the pending token: it is one more than the budget
that is left. So, with one token less, both sides run every round with ``min(block, budget left)``
of *our* budget, and its sequence of acceptances ends one token before ours: see `cut`.
"""

import json
from dataclasses import dataclass
from pathlib import Path

STORE = Path(__file__).parents[1] / "data" / "proof_acceptance.json"


@dataclass(frozen=True)
class Walk:
    """One prompt: the digest of its ids, the emitted ids, and tokens emitted in each round."""

    digest: str
    token_ids: tuple[int, ...]
    rounds: tuple[int, ...]


def cut(rounds, total: int) -> tuple[int, ...]:
    """`rounds` as far as they emit `total` tokens; the last one that counts may be shortened."""
    kept: list[int] = []
    for count in rounds:
        if sum(kept) >= total:
            break
        kept.append(min(count, total - sum(kept)))
    return tuple(kept)


def read_walks() -> dict[str, Walk]:
    """Every stored walk by its prompt's id."""
    stored = json.loads(STORE.read_text(encoding="utf-8"))["walks"]
    return {
        key: Walk(digest, tuple(ids), tuple(int(one) for one in rounds))
        for key, (digest, rounds, ids) in stored.items()
    }


def write_walks(walks: dict[str, Walk], versions: dict[str, str]) -> None:
    """Write the fixture, one line per prompt; a block of up to 9 rows is one digit per round."""
    lines = [
        f"{json.dumps(key)}: "
        + json.dumps([walk.digest, "".join(map(str, walk.rounds)), list(walk.token_ids)])
        for key, walk in walks.items()
    ]
    text = f'{{"versions": {json.dumps(versions)},\n"walks": {{\n' + ",\n".join(lines) + "\n}}\n"
    STORE.write_text(text, encoding="utf-8")
