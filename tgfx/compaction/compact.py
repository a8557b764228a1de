"""compact_: dead channels leave the model in the middle of training, and training goes on, faster.

for step, (x, y) in enumerate(loader):
    loss = criterion(gated(x), y) + gated.budget_loss(flops=0.5)
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    if step % 500 == 499:
        tgfx.compact_(gated, optimizer, ema=averaged)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tgfx.bank import GateBank
from tgfx.compaction.adopt import adopt
from tgfx.compaction.check import check_compactable, check_patience
from tgfx.compaction.choose import Choice, choose
from tgfx.compaction.ema import plan_ema
from tgfx.compaction.optimizers import (
    as_optimizers,
    check_covered,
    check_scaler,
    plan_optimizers,
    warn_of_reset,
)
from tgfx.compaction.rebuild import Rebuilt, rebuild
from tgfx.compaction.report import CompactionReport
from tgfx.errors import VerificationError
from tgfx.gated import GatedModule
from tgfx.ir.rng import untouched_rng
from tgfx.passes.insert_gates import BANK
from tgfx.shrinking import example_like
from tgfx.verify import compared, eval_mode


def compact_(
    gated: GatedModule,
    optimizer: Any = None,
    *,
    ema: Any = None,
    scaler: Any = None,
    patience: int = 1,
    verify: bool = True,
) -> CompactionReport:
    """Remove closed channels from a gated model, in place; its optimizer and averages are cut along.

    `gated`, its layers and its parameters stay the same objects, only smaller. With an optimizer that works element by
    element (SGD, Adam, RMSprop ...) the next steps are those of the uncompacted model with the removed gates fixed at
    zero. Costs, ratios, budgets and plans go on to mean the model that was transformed.

    optimizer: one or a list; ema: a copy of the model, an object that holds one as `.module`, a dict of tensors by
    name, or a list of these; scaler: a GradScaler, which must not be between unscale_ and step.
    patience: a channel goes if it is closed now and was closed at the last `patience` calls; 0 removes every closed
    one. Channels kept by it still have their gates and may reopen. A group that would lose its last channel keeps the
    best, unless its whole branch can go. While a controller moves the gates, groups whose channels cost more than
    half a percent of the budget's kind each keep their best closed one: it may be needed to land on the budget.
    verify: run the model before and after on the example. On any error nothing is changed.
    """
    check_compactable(gated)
    check_patience(patience)
    optimizers = as_optimizers(optimizer)
    check_covered(optimizers, dict(gated.named_parameters()))
    check_scaler(scaler, optimizers)
    with untouched_rng(), torch.no_grad():
        choice = choose(gated, patience)
        rebuilt = rebuild(gated, choice) if choice.going.any() else None
        averages = plan_ema(ema, gated, choice, rebuilt)
        cuts = plan_optimizers(gated, optimizers, rebuilt.positions, rebuilt.gone) if rebuilt is not None else []
        if rebuilt is not None and verify:
            _verify(gated, rebuilt.module)
        names = {id(p): name for name, p in gated.named_parameters()}
        report = _report(gated, choice, rebuilt, [names[id(p)] for one in cuts for p in one.reset])
        for one in cuts:
            one.apply()
        if rebuilt is not None:
            adopt(gated, rebuilt)
        else:
            gated.bank.set_record(choice.record)
        for commit in averages:
            commit()
    warn_of_reset(report.reset, stacklevel=2)
    return report


def _verify(gated: GatedModule, smaller: GatedModule) -> None:
    with eval_mode(gated), eval_mode(smaller):
        result = compared(gated, smaller, *example_like(gated))
    if not result.same:
        raise VerificationError(
            "the compacted model does not compute what the gated one does; nothing was changed",
            expected="equal outputs on the example",
            found="an error" if result.cause else "different ones",
            fix=result.fix,
        ) from result.cause


def _report(gated: GatedModule, choice: Choice, rebuilt: Rebuilt | None, reset: list[str]) -> CompactionReport:
    groups = gated.facts.coupling.groups
    going = {g.name: int(choice.going[g.start : g.start + g.size].sum()) for g in groups}
    own = {name for name, _ in gated.named_parameters() if not name.startswith(f"{BANK}.")}
    after = rebuilt.module if rebuilt is not None else gated
    return CompactionReport(
        removed={name: count for name, count in going.items() if count},
        waiting=int((choice.record > 0).sum()),
        left={g.name: (int(np.sum(choice.record[g.start : g.start + g.size] >= 0)), g.size) for g in groups},
        parameters=(_count(gated), _count(after)),
        gone=tuple(sorted(name for name in own if rebuilt is not None and name in rebuilt.gone)),
        reset=tuple(reset),
    )


def _count(gated: GatedModule) -> int:
    bank = {id(p) for module in gated.modules() if isinstance(module, GateBank) for p in module.parameters()}
    return sum(p.numel() for p in gated.parameters() if id(p) not in bank)
