"""What a person reads about gated weights: a table, and the answer to "why has this one no gates?"."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from tgfx.errors import InputError
from tgfx.passes.couple import Group
from tgfx.passes.weight_cost import WEIGHT_KINDS
from tgfx.report import FLOPS_NOTE, Report

if TYPE_CHECKING:
    from tgfx.weight.gated import WeightGatedModule


class WeightReport(Report):
    """Weights of a gated model as a table (`str`), or as rows for machines (`rows`)."""

    gated: WeightGatedModule

    def rows(self) -> list[dict[str, object]]:
        gates, cost = self.gated.gates, self.gated.facts.cost
        return [
            {
                "group": group.name,
                "open": gates[group.name].open_count() if group.frozen is None else group.size,
                "size": group.size,
                "layers": ", ".join(_names(group)),
                "flops_per_weight": cost.whole("flops", group.name) / group.size if group.frozen is None else 0.0,
                "frozen": str(group.frozen) if group.frozen else "",
            }
            for group in self.gated.groups
        ]

    def totals(self) -> dict[str, tuple[float, float]]:
        """kind -> (now, all open)"""
        return {kind: (float(self.gated.cost(kind).detach()), self.gated.total(kind)) for kind in WEIGHT_KINDS}

    def _kept(self) -> dict[str, list[Group]]:
        kept: dict[str, list[Group]] = {}
        for group in self.gated.groups:
            if group.frozen is not None:
                kept.setdefault(group.frozen.reason, []).append(group)
        return kept

    def __str__(self) -> str:
        out = io.StringIO()
        console = Console(file=out, width=120, highlight=False)
        facts, rows = self.gated.facts, self.rows()
        count = sum(shape.numel() for shape in facts.cost.shapes.values())
        table = Table(title=f"{facts.model_name}: {count:,} gates over {len(facts.cost.shapes)} weights")
        for header, justify in (("weight", "left"), ("open/size", "right"), ("open", "right")):
            table.add_column(header, justify=justify, overflow="fold")  # type: ignore[arg-type]
        for row in rows:
            if not row["frozen"]:
                now, size = int(str(row["open"])), int(str(row["size"]))
                table.add_row(str(row["layers"]), f"{now:,}/{size:,}", f"{now / size:.1%}")
        console.print(table)
        for reason, own in self._kept().items():
            entries = sum(group.size for group in own)
            console.print(f"no gates ({len(own)} parameters, {entries:,} entries): {reason}; e.g. {own[0].name}")
        for kind, (now_cost, total) in self.totals().items():
            console.print(f"{kind:>9}: {now_cost:,.0f} of {total:,.0f} ({now_cost / max(total, 1):.1%})")
        for refusal in facts.source.refusals:
            console.print(f"kept closed: {refusal}")
        console.print(FLOPS_NOTE)
        return out.getvalue()


def explain_weight(gated: WeightGatedModule, name: str) -> str:
    """Text about a layer or a parameter."""
    about = [g for g in gated.groups if any(own in (name,) or own.rpartition(".")[0] == name for own in _names(g))]
    if not about:
        known = dict.fromkeys(own.rpartition(".")[0] for g in gated.groups for own in _names(g))
        raise InputError(
            f"nothing to explain about {name!r}",
            expected="a layer or parameter of the model",
            found=str(name),
            fix="for example: " + ", ".join(list(known)[:5]),
        )
    return "\n\n".join(_explain(gated, group) for group in about)


def _explain(gated: WeightGatedModule, group: Group) -> str:
    if group.frozen is not None:
        lines = [f"{group.name}: no gates, all {group.size:,} entries stay.", f"  reason: {group.frozen}"]
    else:
        opened = gated.gates[group.name].open_count()
        flops = gated.facts.cost.whole("flops", group.name) / group.size
        lines = [
            f"{group.name}: one gate per entry, {opened:,} of {group.size:,} open.",
            f"  an entry costs {flops:,.0f} FLOPs per sample"
            + ("" if len(_names(group)) == 1 else ", all uses together"),
        ]
    if len(_names(group)) > 1:
        lines.append("  tied: " + ", ".join(_names(group)))
    return "\n".join(lines)


def _names(group: Group) -> list[str]:
    return list(dict.fromkeys(member.name for member in group.members))
