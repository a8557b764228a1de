"""Removing dead channels in the middle of training."""

from tgfx.compaction.compact import compact_
from tgfx.compaction.report import CompactionReport
from tgfx.compaction.restore import is_compacted, restore_

__all__ = ["CompactionReport", "compact_", "is_compacted", "restore_"]
