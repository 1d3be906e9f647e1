"""Engines record nothing for a backward pass, whether or not somebody said so before."""

import torch

from protocol.kernels.inference import inference


class Engine:
    weight = torch.ones(3, requires_grad=True)

    @inference
    def run(self, factor, *, more=0.0):
        """Multiply."""
        return (self.weight * factor + more, torch.is_inference_mode_enabled())


def test_a_call_enters_inference_mode_and_leaves_it():
    made, within = Engine().run(2.0, more=1.0)
    assert made.tolist() == [3.0, 3.0, 3.0]
    assert within
    assert made.is_inference()
    assert not torch.is_inference_mode_enabled()
    assert Engine.run.__doc__ == "Multiply."


def test_a_call_in_inference_mode_stays_in_it():
    with torch.inference_mode():
        made, within = Engine().run(2.0)
        assert torch.is_inference_mode_enabled()
    assert within
    assert made.is_inference()
    assert not torch.is_inference_mode_enabled()
