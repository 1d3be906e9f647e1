"""A target daemon with faults: ``python -I problem_target.py CONFIG.json``.

They begin after the first Hello, so that the load itself succeeds:

- a verify of more than one row asks for 64 TiB, and so does one of any width in a sequence whose
  first token is 90;
- choosing the first token after a prompt that ends in token 91 raises KeyError.
"""

import sys

import torch

from protocol.daemon_main import run_target
from target_daemon import daemon

DOOMED, DEFECT = 90, 91


def main():
    load, meet = daemon.load_target, daemon.TargetDaemon._meet
    loaded = []

    def load_target(*arguments):
        loaded.append(load(*arguments))
        return loaded[0]

    def meeting(self, hello):
        answer = meet(self, hello)
        while loaded:
            spoil(loaded.pop())
        return answer

    daemon.load_target, daemon.TargetDaemon._meet = load_target, meeting
    return run_target(sys.argv[1:], daemon.load_daemon)


def spoil(target):
    forward = target.verify_batch
    doomed = set()

    def verify_batch(slot, tokens, base_pos, logits):
        result = forward(slot, tokens, base_pos, logits)
        if base_pos == 0:
            doomed.discard(slot)
            if tokens[0] == DOOMED:
                doomed.add(slot)
        if logits == "all" and (len(tokens) > 1 or slot in doomed):
            torch.empty(1 << 46, dtype=torch.uint8)
        if logits == "last" and tokens[-1] == DEFECT:
            raise KeyError("a defect")
        return result

    target.verify_batch = verify_batch


if __name__ == "__main__":
    sys.exit(main())
