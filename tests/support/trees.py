"""Token trees for tests: random ones, and a drafter that makes them of what it knows."""

import random

from support.drive import pack

from protocol.messages import VerifyItem


def random_parents(source: random.Random, rows: int) -> list[int]:
    """Parents of rows 1 .. rows - 1, deep and wide alike."""
    return [max(0, row - 1 - int(source.expovariate(0.5))) for row in range(1, rows)]


def random_tree(source: random.Random, right: list[int], rows: int, vocab: int):
    """Ids of rows 1 .. and their parents; some path from the root is `right` for a while.

    Siblings differ, as they must.
    """
    parents, ids, known = random_parents(source, rows), [], {0: 0}
    taken: set[tuple[int, int]] = set()
    for row, parent in enumerate(parents, start=1):
        depth = known.get(parent)
        wanted = right[depth] if depth is not None and depth < len(right) else -1
        if wanted >= 0 and (parent, wanted) not in taken and source.random() < 0.7:
            token, known[row] = wanted, depth + 1
        else:
            token = next(
                t
                for t in iter(lambda: source.randrange(vocab), None)
                if t != wanted and (parent, t) not in taken
            )
        taken.add((parent, token))
        ids.append(token)
    return ids, parents


def path_of(row: int, parents) -> list[int]:
    """Rows from the root to `row`."""
    path = [row]
    while path[-1]:
        path.append(parents[path[-1] - 1])
    return path[::-1]


def tree_item(ids, parents, *, base, number=1, budget=50, sequence=1):
    """A Verify of the tree with `ids` (row 0 is the pending token)."""
    return VerifyItem(
        sequence=sequence,
        round=number,
        base_pos=base,
        tokens=pack(ids),
        parents=pack(parents),
        budget=budget,
    )
