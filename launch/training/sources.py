"""Where talks come from: the table of tasks, or prompts from files. Pure; by number and seed."""

import random
from collections.abc import Sequence
from typing import Final, Protocol

from launch.training.documents import DocumentFile, Documents
from launch.training.moves import Answer, Say, Talk, Task, Texts
from launch.training.prompt_files import Prompt, PromptFile
from launch.training.tasks import ABOUT_TEXTS, TASKS

PASSES: Final = 4  # over prompts from files: one greedy, then sampled


class Source(Protocol):
    """Talks by number; the same number and seed give the same talk."""

    def talk(self, number: int) -> Talk | None:
        """None: there are no more."""
        ...

    def repeat(self, number: int) -> int:
        """How often the talk's prompts came before it; the same prompt may come once in each."""
        ...

    def greedy(self, number: int) -> bool | None:
        """How a talk is answered; None: as it decides itself."""
        ...

    @property
    def ends(self) -> bool:
        """Whether there are no more at some time."""
        ...


class OwnSource:
    """Talks that the target has with itself; each run of `cycle` talks has all tasks by weight."""

    def __init__(self, tasks: Sequence[Task], seed: int, texts: Texts | None = None) -> None:
        self._seed, self._texts = seed, texts
        self._cycle = [task for task in tasks for _ in range(task.weight)]

    def talk(self, number: int) -> Talk | None:
        cycle, place = divmod(number, len(self._cycle))
        order = list(range(len(self._cycle)))
        random.Random(f"{self._seed} cycle {cycle}").shuffle(order)  # noqa: S311 - no secret
        task = self._cycle[order[place]]
        return Talk(task.name, task.moves, _chance(self._seed, number), texts=self._texts)

    def repeat(self, number: int) -> int:
        del number
        return 0

    def greedy(self, number: int) -> bool | None:
        del number
        return None

    @property
    def ends(self) -> bool:
        return False


class FileSource:
    """Prompts as they stand, in their order: all answered greedily, then all again sampled."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self._prompts = prompts
        self._seed = seed

    def talk(self, number: int) -> Talk | None:
        if self.repeat(number) >= PASSES:
            return None
        prompt = self._prompts[number % len(self._prompts)]
        moves = [move for turn in prompt.turns for move in (Say((turn,), as_is=True), Answer())]
        return Talk(prompt.task, moves, _chance(self._seed, number), system=prompt.system)

    def repeat(self, number: int) -> int:
        return number // len(self._prompts)

    def greedy(self, number: int) -> bool | None:
        return self.repeat(number) == 0

    @property
    def ends(self) -> bool:
        return True


def source_of(
    prompt_files: Sequence[PromptFile], texts: Sequence[DocumentFile], seed: int
) -> Source:
    """The prompts that were named, else talks, about the texts that were named too."""
    prompts = [prompt for file in prompt_files for prompt in file.prompts]
    documents = [document for file in texts for document in file.documents]
    if prompts:
        return FileSource(prompts, seed)
    found = Documents(documents)
    about = (task for foreign in sorted(found.kinds) for task in ABOUT_TEXTS[foreign])
    return OwnSource((*TASKS, *about), seed, found)


def _chance(seed: int, number: int) -> random.Random:
    return random.Random(f"{seed} talk {number}")  # noqa: S311 - no secret, and the same everywhere
