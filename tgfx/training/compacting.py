"""compact_ at every n-th step of somebody else's training loop, and a smaller checkpoint into a model of full size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tgfx.compaction import CompactionReport, compact_, is_compacted, restore_
from tgfx.compaction.check import check_compactable, check_patience
from tgfx.errors import InputError
from tgfx.gated import GatedModule


class Compacting:
    """every: optimizer steps from one compaction to the next (None: never); patience: as in `tgfx.compact_`."""

    def __init__(self, every: int | None, patience: int = 1) -> None:
        check_patience(patience)
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise InputError(
                "compact_every is a number of optimizer steps", expected="1, 2, 3, ... or None", found=repr(every)
            )
        self.every, self.patience = every, patience
        self._hook: RemovableHandle | None = None
        self._loading = False
        self._last = -1  # step of the last compaction: frameworks tell a step more than once

    def watch(self, gated: GatedModule) -> None:
        """Ask now whether the model can be cut; a state_dict of a smaller one is then cut to before it is loaded.

        Frameworks load a checkpoint into a model that was made anew, so it has all of its channels.
        """
        if self.every is None:
            return
        check_compactable(gated)
        self.close()

        def cut_first(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            if is_compacted(own) and not self._loading:
                self._loading = True
                try:
                    restore_(module, own)
                finally:
                    self._loading = False

        self._hook = gated.register_load_state_dict_pre_hook(cut_first)

    def after(self, step: int, gated: GatedModule, optimizers: Sequence[Optimizer]) -> CompactionReport | None:
        """To be called after optimizer step number `step`; None between compactions."""
        if self.every is None or step == 0 or step % self.every or step == self._last:
            return None
        self._last = step
        return compact_(gated, list(optimizers), patience=self.patience)

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def check_one_process(count: int, framework: str) -> None:
    """Wrappers for many processes hold on to the parameters as they were, and only the framework can wrap again."""
    if count > 1:
        raise InputError(
            f"compact_every is for one process with {framework}",
            expected="one process",
            found=f"{count}",
            fix="leave it out here, or train with a loop of your own as in examples/distributed",
        )
