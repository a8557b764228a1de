"""The nouns every pass speaks in: identities, refusals, facts about a captured graph."""

from tgfx.ir.facts import Axis, ChannelMap, NodeIds, Read, TensorIds
from tgfx.ir.ids import IdSpace
from tgfx.ir.refusal import Refusal
from tgfx.ir.source import Source

__all__ = ["Axis", "ChannelMap", "IdSpace", "NodeIds", "Read", "Refusal", "Source", "TensorIds"]
