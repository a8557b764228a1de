"""What a person reads: the table of groups, and the answer to "why was this layer not cut?"."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tgfx.errors import InputError
from tgfx.passes.couple import Group

if TYPE_CHECKING:
    from tgfx.gated import GatedModule

FLOPS_NOTE = "FLOPs = 2 x multiply-adds per sample, convolutions and fully-connected layers"


class Report:
    """Groups of a gated model as a table (`str`), or as rows for machines (`rows`)."""

    def __init__(self, gated: GatedModule) -> None:
        self.gated = gated

    def rows(self) -> list[dict[str, object]]:
        gates = self.gated.gates
        opened = {name: gate.open_count() for name, gate in gates.items()}
        share = {name: float(m.mean()) for name, m in self.gated.marginal("flops").items()}
        return [
            {
                "group": g.name,
                "open": opened.get(g.name, 0 if g.frozen is None else g.size),
                "size": g.size,
                "left": len(gates[g.name].weight) if g.name in gates else 0 if g.frozen is None else g.size,
                "layers": _layers(g),
                "tied_by": g.op if g.frozen is None else "",
                "flops_per_channel": share.get(g.name, 0.0),
                "frozen": str(g.frozen) if g.frozen else "",
            }
            for g in self.gated.groups
        ]

    def totals(self) -> dict[str, tuple[float, float]]:
        """kind -> (now, all open)"""
        return {k: (float(self.gated.cost(k).detach()), self.gated.total(k)) for k in ("flops", "params", "channels")}

    def __str__(self) -> str:
        out = io.StringIO()
        console = Console(file=out, width=120, highlight=False)
        facts = self.gated.facts
        table = Table(title=f"{facts.model_name}: {len(self.gated.gates)} gates over {facts.coupling.slots} channels")
        for header, justify in (
            ("group", "left"),
            ("open/size", "right"),
            ("layers", "left"),
            ("tied by / kept since", "left"),
        ):
            table.add_column(header, justify=justify, overflow="fold")  # type: ignore[arg-type]
        for row in self.rows():
            state = f"{row['open']}/{row['size']}" if not row["frozen"] else f"kept {row['size']}"
            if row["left"] != row["size"]:  # compact_ removed some
                state = f"{row['open']}/{row['left']} of {row['size']}"
            table.add_row(str(row["group"]), state, str(row["layers"]), str(row["frozen"] or row["tied_by"]))
        console.print(table)
        for kind, (now, total) in self.totals().items():
            console.print(f"{kind:>9}: {now:,.0f} of {total:,.0f} ({now / max(total, 1):.1%})")
        for refusal in facts.source.refusals:
            console.print(f"kept closed: {refusal}")
        console.print(FLOPS_NOTE)
        return out.getvalue()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # notebooks
        printer.text(str(self))


def _layers(group: Group, most: int = 4) -> str:
    layers = list(dict.fromkeys(m.name.rpartition(".")[0] or m.name for m in group.members))
    return ", ".join(layers[:most]) + (f", and {len(layers) - most} more" if len(layers) > most else "")


def explain(gated: GatedModule, name: str) -> str:
    """Text about a group, a layer or a parameter."""
    about = [
        g for g in gated.groups
        if g.name == name or any(m.name == name or m.name.rpartition(".")[0] == name for m in g.members)
    ]  # fmt: skip
    if not about:
        known = dict.fromkeys(m.name.rpartition(".")[0] for g in gated.groups for m in g.members)
        raise InputError(
            f"nothing to explain about {name!r}",
            expected="a layer, parameter or group of the model",
            found=name,
            fix="for example: " + ", ".join(list(known)[:5]),
        )
    return "\n\n".join(_explain_group(gated, group, name) for group in about)


def _explain_group(gated: GatedModule, group: Group, name: str) -> str:
    role = _role(group, name)
    if group.frozen is not None:
        lines = [f"{name}: {role} kept ({group.size} channels).", f"  reason: {group.frozen}"]
    else:
        opened = int(gated.open_slots()[group.start : group.start + group.size].sum())
        removed = group.size - len(gated.gate_slots(group.name))
        lines = [
            f"{name}: {role} group '{group.name}', {group.size} channels, {opened} open"
            + (f", {removed} removed by compact_." if removed else "."),
            "  can be cut: closing a gate removes its slice of every member below.",
        ]
    lines.append("  members: " + ", ".join(map(str, group.members)))
    for tie in group.ties[:12]:
        lines.append(f"  tied by {tie.op} at {tie.node}" + (f" ({tie.source})" if tie.source else ""))
    return "\n".join(lines)


def _role(group: Group, name: str) -> str:
    axes = [m for m in group.members if m.name.rpartition(".")[0] == name or m.name == name]
    if not axes:
        return ""
    return "axis " + ", ".join(sorted({f"{m.name.rpartition('.')[2]}[{m.axis}]" for m in axes})) + " of"


__all__ = ["FLOPS_NOTE", "Report", "explain"]
