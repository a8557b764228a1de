"""A "no" with its reason: why some channels are kept."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """Channels that stay, and why.

    reason: a short sentence; node: the graph node where it was decided; op: the operator met there;
    source: the user's own line (``file:line``), where the tracer recorded one; limit: a limit of tgfx (an operator
    without a rule, a closed box) rather than of the model, which ``strict=True`` does not accept.
    """

    reason: str
    node: str = ""
    op: str = ""
    source: str = ""
    limit: bool = False

    def __str__(self) -> str:
        place = f" at {self.node}" if self.node else ""
        operator = f" [{self.op}]" if self.op and self.op != self.node else ""
        line = f" ({self.source})" if self.source else ""
        return f"{self.reason}{place}{operator}{line}"
