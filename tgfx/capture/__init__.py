"""Front ends: from a user's nn.Module to a graph (fx where it can, torch.export where it must)."""

from tgfx.capture.capture import capture, prepare
from tgfx.capture.copying import copy_model
from tgfx.capture.examples import example_inputs_for

__all__ = ["capture", "copy_model", "example_inputs_for", "prepare"]
