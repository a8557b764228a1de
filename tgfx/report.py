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
                "kind": g.kind,
                "open": opened.get(g.name, 0 if g.frozen is None else g.size),
                "size": g.size,
                "left": len(gates[g.name].weight) if g.name in gates else 0 if g.frozen is None else g.size,
                "layers": _layers(g),
                "tied_by": _tied_by(self.gated, g),
                "flops_per_channel": share.get(g.name, 0.0),
                "frozen": str(g.frozen) if g.frozen else "",
            }
            for g in self.gated.groups
        ]

    def totals(self) -> dict[str, tuple[float, float]]:
        """kind -> (now, all open)"""
        kinds = [kind for kind in self.gated.kinds if kind != "flops_all"]
        return {k: (float(self.gated.cost(k).detach()), self.gated.total(k)) for k in kinds}

    def __str__(self) -> str:
        out = io.StringIO()
        console = Console(file=out, width=120, highlight=False)
        facts = self.gated.facts
        table = Table(title=f"{facts.model_name}: {len(self.gated.gates)} gates over {_counts(facts.coupling.groups)}")
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
            state += " heads" if row["kind"] == "head" else ""
            table.add_row(str(row["group"]), state, str(row["layers"]), str(row["frozen"] or row["tied_by"]))
        console.print(table)
        for kind, (now, total) in self.totals().items():
            console.print(f"{kind:>9}: {amount(kind, now)} of {amount(kind, total)} ({now / (total or 1):.1%})")
        for refusal in facts.source.refusals:
            console.print(f"kept closed: {refusal}")
        console.print(FLOPS_NOTE)
        return out.getvalue()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # notebooks
        printer.text(str(self))


def amount(kind: str, value: float) -> str:
    """A cost as text: ms of the latency, else a count."""
    return f"{value:,.3f} ms" if kind == "latency" else f"{value:,.0f}"


def render(table: Table) -> str:
    """A rich table as plain text."""
    out = io.StringIO()
    Console(file=out, width=120, highlight=False).print(table)
    return out.getvalue()


def _counts(groups: tuple[Group, ...]) -> str:
    """E.g. "4096 channels, 8 layers"."""
    sizes: dict[str, int] = {}
    for group in groups:
        sizes[group.kind] = sizes.get(group.kind, 0) + (1 if group.kind == "choice" else group.size)
    return ", ".join(f"{size} {kind}{'' if size == 1 else 's'}" for kind, size in sizes.items())


def _tied_by(gated: GatedModule, group: Group) -> str:
    if group.frozen is not None:
        return ""
    if group.kind == "layer":
        return "a branch, goes as a whole"
    if group.kind == "choice":
        return f"one of {group.size}: alternative {int(gated.gates[group.name].is_open().nonzero())} is chosen"
    return group.op


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
    elif group.is_switch:
        lines = _explain_switch(gated, group)
    else:
        opened = int(gated.open_slots()[group.start : group.start + group.size].sum())
        removed = group.size - len(gated.gate_slots(group.name))
        lines = [
            f"{name}: {role} group '{group.name}', {group.size} {group.kind}s, {opened} open"
            + (f", {removed} removed by compact_." if removed else "."),
            "  can be cut: closing a gate removes its slice of every member below.",
        ]
    lines.append("  members: " + ", ".join(map(str, group.members)))
    how = "tied" if not group.is_switch else group.ties[0].reason
    for tie in group.ties[:12]:
        lines.append(f"  {how} by {tie.op} at {tie.node}" + (f" ({tie.source})" if tie.source else ""))
    return "\n".join(lines)


def _explain_switch(gated: GatedModule, group: Group) -> list[str]:
    opened = gated.gates[group.name].is_open()
    if group.kind == "layer":
        state = "open" if bool(opened.all()) else "closed"
        return [
            f"{group.name}: a residual branch under one gate, {state}.",
            "  can be cut: closing the gate removes the branch and leaves the other side of the addition.",
        ]
    return [
        f"{group.name}: a choice of one among {group.size}, alternative {int(opened.nonzero())} is chosen.",
        "  the others are cut.",
    ]


def _role(group: Group, name: str) -> str:
    axes = [m for m in group.members if m.name.rpartition(".")[0] == name or m.name == name]
    if not axes:
        return ""
    return "axis " + ", ".join(sorted({f"{m.name.rpartition('.')[2]}[{m.place}]" for m in axes})) + " of"


__all__ = ["FLOPS_NOTE", "Report", "amount", "explain", "render"]
