"""A budget: how much of the whole model may stay, by one or several kinds of cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tgfx.errors import BudgetError
from tgfx.passes.cost import KINDS, MEASURED


@dataclass(frozen=True)
class Budget(Mapping[str, float]):
    """Cost kind -> share of the whole that may stay, in (0, 1]. Reads like a dict."""

    shares: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, budget: Mapping[str, float] | Budget | None = None, /, **shares: float) -> Budget:
        """From a mapping, from keywords, or both; checked."""
        if budget is not None and not isinstance(budget, Mapping):
            raise BudgetError("this is not a budget", expected='e.g. {"flops": 0.5}', found=repr(budget))
        merged = {**(budget or {}), **shares}
        if not merged:
            raise BudgetError("no budget given", expected="e.g. flops=0.5", found="nothing")
        for kind, share in merged.items():
            check_kind(kind)
            if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
                raise BudgetError(
                    f"budget {kind}={share!r} cannot be met",
                    expected="a share of the whole, more than 0 and at most 1",
                    found=repr(share),
                    fix=f"{kind}=0.5 keeps half",
                )
        return cls(tuple((kind, float(share)) for kind, share in merged.items()))

    def __getitem__(self, kind: str) -> float:
        return dict(self.shares)[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self.shares))

    def __len__(self) -> int:
        return len(self.shares)

    def __str__(self) -> str:
        return ", ".join(f"{kind} {share:.1%}" for kind, share in self.shares)


def check_kind(kind: str) -> str:
    """`kind` itself, if it is a kind of cost."""
    if kind not in KINDS and kind not in MEASURED:
        raise BudgetError(f"unknown cost kind {kind!r}", expected=", ".join((*KINDS, *MEASURED)), found=repr(kind))
    return kind
