"""`torch.inference_mode` for whole calls of an engine, entered where it is not in force already.

Entering it costs as much as all other Python of a call where the caches are cold, so that a daemon
enters it once, for as long as it serves. Whoever calls an engine by itself need not know.
"""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
Owner = TypeVar("Owner")
Answer = TypeVar("Answer")
Method = Callable[Concatenate[Owner, P], Answer]


def inference(method: Method[Owner, P, Answer]) -> Method[Owner, P, Answer]:
    """`method`, never recorded for a backward pass."""
    guarded = torch.inference_mode()(method)

    @functools.wraps(method)
    def call(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> Answer:
        if torch.is_inference_mode_enabled():
            return method(self, *args, **kwargs)
        return guarded(self, *args, **kwargs)

    return call
