"""Front ends: from a user's nn.Module to a graph (fx where it can, torch.export where it must)."""

from tgfx.capture.capture import capture, prepare
from tgfx.capture.examples import example_inputs_for

__all__ = ["capture", "example_inputs_for", "prepare"]
