"""AdamW (arXiv 1711.05101) and the moving average of the weights, both with a state to keep."""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

BETAS: Final = (0.9, 0.98)
MOMENTS: Final = ("exp_avg", "exp_avg_sq")
SHORT: Final = 10  # steps, until which an average is hardly one


class Optimiser:
    """Decays matrices and not norms; clips what is longer than `clip`."""

    def __init__(self, network: nn.Module, decay: float, clip: float) -> None:
        self._parameters = dict(network.named_parameters())
        self._clip = clip
        matrices = [each for each in self._parameters.values() if each.dim() > 1]
        others = [each for each in self._parameters.values() if each.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, fused=True)

    def clipped(self) -> float:
        """Clip the gradients that are there; returns how long they were together."""
        return float(nn.utils.clip_grad_norm_(self._parameters.values(), self._clip))

    def step(self, rate: float) -> None:
        """Take the gradients that are there, and forget them."""
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        self._adam.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """Both moments of every parameter; empty before the first step."""
        return {
            f"{moment}.{name}": self._adam.state[parameter][moment]
            for name, parameter in self._parameters.items()
            for moment in MOMENTS
            if parameter in self._adam.state
        }

    def load(self, state: Mapping[str, Tensor], step: int) -> None:
        """Go on from `state`, after `step` steps."""
        for name, parameter in self._parameters.items():
            moments = {moment: state[f"{moment}.{name}"] for moment in MOMENTS}
            moments = {key: each.to(parameter.device) for key, each in moments.items()}
            count = torch.tensor(float(step), device=parameter.device)
            self._adam.state[parameter] = {"step": count, **moments}


class Average:
    """An exponential moving average, short at the start; with `decay` 0 the weights themselves."""

    def __init__(self, network: nn.Module, decay: float) -> None:
        self._decay = decay
        self._live = {name: each.detach() for name, each in network.named_parameters()}
        self.weights = {name: each.clone() for name, each in self._live.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights behind step `step`."""
        decay = min(self._decay, (1 + step) / (SHORT + step))
        ours, theirs = list(self.weights.values()), list(self._live.values())
        torch._foreach_lerp_(ours, theirs, 1 - decay)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Go on from `weights`."""
        for name, each in self.weights.items():
            each.copy_(weights[name])
