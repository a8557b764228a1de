"""Milliseconds as a kind of cost: tables of measured layer times, and budgets in them.

gated.use_latency(tgfx.latency.measure(gated))
tgfx.finish(gated, latency=0.5)
"""

from tgfx.latency.attaching import attach
from tgfx.latency.measuring import measure, template
from tgfx.latency.table import LatencyTable, read_csv

__all__ = ["LatencyTable", "attach", "measure", "read_csv", "template"]
