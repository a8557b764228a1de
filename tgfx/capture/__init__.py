"""Front ends: from a user's nn.Module to a graph (fx where it can, torch.export where it must)."""

from tgfx.capture.capture import capture
from tgfx.capture.copying import copy_model
from tgfx.capture.examples import example_inputs_for
from tgfx.capture.reference import Reference, prepare

__all__ = ["Reference", "capture", "copy_model", "example_inputs_for", "prepare"]
