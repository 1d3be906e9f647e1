"""A draft is trained in this process, and held against what the real loop makes of it."""

from pathlib import Path

import torch
from support.real_pair import Checkpoints, real_pair

from draft_daemon.training.data import Corpus
from draft_daemon.training.ranks import Ranks
from draft_daemon.training.run import run
from draft_daemon.training.walk import Figures
from protocol.checkpoints.draft_config import read_draft_config
from protocol.ending import EndingSignals
from protocol.training import DATA_FOLDER, STEPS_FILE


class EndsAt(EndingSignals):
    """Is told to end when that many steps are in the journal."""

    def __init__(self, config, step: int) -> None:
        super().__init__()
        self._journal, self._step = Path(config.folder) / STEPS_FILE, step

    def ended(self) -> bool:
        there = self._journal.read_bytes() if self._journal.exists() else b""
        if there.count(b'"Stepped"') >= self._step:
            self._reason = "told to end by the test"
        return bool(self._reason)


def train(config, *, ends_at=1 << 30, say=None):
    lines = []
    before = torch.get_num_threads()
    try:
        trained = run(config, Ranks(), EndsAt(config, ends_at), say or lines.append)
    finally:
        torch.set_num_threads(before)
    return trained, lines


def figures_of_the_loop(model, folder) -> Figures:
    """The held-out answers of `folder`, generated with its draft: rounds as the loop counts them.

    Asserts that every answer is the target's again.
    """
    config, figures = read_draft_config(folder), Figures()
    both = real_pair(
        Checkpoints(model, folder), dtype="float32", exact=False, threads=1, max_positions=128
    )
    data = folder / DATA_FOLDER
    with both as pair, Corpus(data, config.target_layer_ids, config.vocab_size, None) as corpus:
        network = pair.draft._network
        project = network.project_context
        # Kept features are bfloat16, those of a ring in fp32 are not.
        network.project_context = lambda rows, start: project(rows.bfloat16().float(), start)
        for place in corpus.walked:
            text = corpus.text(place)
            tokens = text.tokens.tolist()
            prompt, answer = tokens[: text.prompt], tokens[text.prompt :]
            done = pair.run(prompt, len(answer), speculative=True)
            assert list(done.token_ids) == answer
            for emitted, proposed in zip(done.rounds, done.proposed, strict=True):
                if proposed:
                    figures.add(text.task, emitted - 1)
    return figures
