"""Removing dead channels in the middle of training."""

from tgfx.compaction.compact import compact_
from tgfx.compaction.report import CompactionReport
from tgfx.compaction.restore import restore_

__all__ = ["CompactionReport", "compact_", "restore_"]
