"""Removing dead channels in the middle of training."""

from tgfx.compaction.compact import compact_
from tgfx.compaction.report import CompactionReport

__all__ = ["CompactionReport", "compact_"]
