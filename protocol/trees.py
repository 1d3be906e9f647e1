"""Token trees as they travel: the parent of every row but the first. Pure.

Row 0 is the pending token, and the only root; row ``i`` has row ``parents[i - 1]`` before it in the
text. Parents stand before their children, so that one pass over the rows meets a row's whole path
first. DDTree and its relatives (SpecInfer, arXiv 2305.09781) verify such a tree in one forward.
"""

from collections.abc import Sequence
from itertools import pairwise

from protocol.errors import ProtocolError


def depths(parents: Sequence[int]) -> tuple[int, ...]:
    """Tokens between each row and the root, 0 for row 0; ProtocolError for what is no tree."""
    found = [0]
    for row, parent in enumerate(parents, start=1):
        if not 0 <= parent < row:
            raise ProtocolError(f"row {row} of a tree follows row {parent}; 0 to {row - 1} can be")
        found.append(found[parent] + 1)
    return tuple(found)


def check_siblings(ids: Sequence[int], parents: Sequence[int]) -> None:
    """ProtocolError where two rows would stand for the same text."""
    edges = list(zip(parents, ids[1:], strict=True))
    if len(set(edges)) != len(edges):
        parent, token = next(edge for edge in edges if edges.count(edge) > 1)
        raise ProtocolError(f"token {token} follows row {parent} of a tree more than once")


def is_path(path: Sequence[int], parents: Sequence[int]) -> bool:
    """Whether `path` goes from row 0 downwards, each row a child of the one before."""
    if not path or path[0] != 0 or max(path) > len(parents):
        return False
    return all(row > 0 and parents[row - 1] == before for before, row in pairwise(path))
