"""Memory that a daemon will need, held against what it may still take, before it loads anything.

Pages are touched lazily, so a load that fits today may die in the middle of a long prompt
tomorrow: everything is counted in full, and what does not fit is refused with the arithmetic.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protocol.errors import InsufficientMemory

UNLIMITED: Final = 1 << 62  # cgroup v1 states "no limit" as a huge number
MEGABYTE: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Line:
    """One part of the plan: ``factors`` multiply to `size` bytes."""

    name: str
    size: int
    arithmetic: str
    remedy: str = ""  # what makes it smaller, where that is a setting of its own


@dataclass(frozen=True, slots=True)
class Available:
    """Bytes that this process may still take, and what says so."""

    size: int
    source: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The lines of one daemon, and the context and slots that they are for."""

    role: str
    lines: tuple[Line, ...]
    positions: int
    slots: int
    fixed: int  # bytes without any context
    per_position: int  # bytes that each position of context costs, in all slots

    @property
    def needed(self) -> int:
        """Bytes in all."""
        return sum(line.size for line in self.lines)

    def check(self, available: Available) -> str:
        """The plan in one line, largest part first.

        Raises InsufficientMemory, with every line and a remedy, where `available` is less.
        """
        if self.needed <= available.size:
            parts = sorted(self.lines, key=lambda line: -line.size)
            told = ", ".join(f"{line.name} {megabytes(line.size)}" for line in parts if line.size)
            left = f"{megabytes(available.size)} are available ({available.source})"
            return f"memory: {megabytes(self.needed)} of what {left}: {told}"
        width = max(len(line.name) for line in self.lines)
        rows = [
            f"  {line.name:<{width}}  {megabytes(line.size):>12}  = {line.arithmetic}"
            for line in self.lines
        ]
        raise InsufficientMemory(
            f"the {self.role} needs {megabytes(self.needed)}, and {megabytes(available.size)} are "
            f"available ({available.source}):\n"
            + ";\n".join(rows)
            + ".\n"
            + self._remedy(available)
        )

    def _remedy(self, available: Available) -> str:
        largest = max(self.lines, key=lambda line: line.size)
        if largest.remedy:
            return f"The largest part is {largest.name}: {largest.remedy} needs less."
        fits = max(0, available.size - self.fixed) // max(1, self.per_position)
        if fits:
            return (
                f"A context of at most {fits:,} tokens fits (now {self.positions:,}, in "
                f"{self.slots} slots); fewer slots or --dtype bfloat16 need less, too."
            )
        return (
            f"Even without any context {megabytes(self.fixed)} are needed: free memory, use fewer "
            f"slots (now {self.slots}), --dtype bfloat16, or a smaller model."
        )


def counted(name: str, *factors: tuple[int, str]) -> Line:
    """The part that `factors` and their units multiply to."""
    size = 1
    for factor, _ in factors:
        size *= factor
    return Line(name, size, " x ".join(f"{factor:,} {unit}" for factor, unit in factors))


def megabytes(size: int) -> str:
    return f"{size / MEGABYTE:,.1f} MB"


def available(root: Path = Path("/")) -> Available:
    """The least of what the kernel has available and what every enclosing cgroup leaves.

    `root` stands for the file system's root, for tests. File pages that the kernel can drop at
    any time do not count as used.
    """
    found = [*_kernel(root), *_cgroups(root)]
    return min(found, key=lambda one: one.size, default=Available(UNLIMITED, "no limit is known"))


def _kernel(root: Path) -> Iterator[Available]:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield Available(int(line.split()[1]) * 1024, "MemAvailable")


def _cgroups(root: Path) -> Iterator[Available]:
    base = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _walk(base, path, ("memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _walk(base / "memory", path, names)


def _walk(base: Path, path: str, names: tuple[str, str, str]) -> Iterator[Available]:
    """The limits from the group at `path` up to `base`; the path may be another namespace's."""
    folder = base / path.strip("/")
    for group in (folder, *folder.parents):
        limit, used = (_text(group / name).strip() for name in names[:2])
        if limit.isdigit() and used.isdigit() and int(limit) < UNLIMITED:
            cached = _statistic(group / "memory.stat", names[2])
            left = int(limit) - max(0, int(used) - cached)
            yield Available(max(0, left), f"limit of cgroup {group.relative_to(base)}")
        if group == base:
            return


def _statistic(path: Path, name: str) -> int:
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
