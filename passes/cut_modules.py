"""The modules and tensors of the smaller model: the part of a cut that is not about the graph."""

from __future__ import annotations

import copy

from torch import Tensor, fx, nn

from tgfx.ir.source import Source
from tgfx.ir.take import take
from tgfx.ir.tree import find, has_module, put_in_order, put_module, put_tensor
from tgfx.ops.modules import cut_module, is_resizable_module
from tgfx.passes.cut_taps import TapCut
from tgfx.passes.dead_branches import DeadBranches, parameters_of
from tgfx.passes.kept_positions import KeptPositions
from tgfx.passes.survivors import Survivors


class ModuleCut:
    """Smaller copies of all modules that are still called or hold a tensor, under their old names."""

    def __init__(
        self,
        source: Source,
        positions: KeptPositions,
        dead: DeadBranches,
        skipped: frozenset[str],
        tensors: dict[str, Tensor],
        present: Survivors | None,
        taps: dict[str, TapCut],
    ) -> None:
        """`skipped`: nodes that the smaller graph has not; `tensors`, `present`: see passes/cut.py; `taps`: by weight,
        where some are gone."""
        self.taps = taps
        self.source, self.positions, self.dead, self.skipped = source, positions, dead, skipped
        self.gone = parameters_of(source, dead.nodes) if dead.nodes else set()
        self.called: dict[bool, set[str]] = {True: set(), False: set()}  # layers by whether their call stays
        for node in source.module.graph.nodes:
            if node.op == "call_module":
                self.called[node.name not in dead.nodes].add(str(node.target))
        self.sliced = self._sliced(tensors, present)

    def cut(self) -> nn.Module:
        root = nn.Module()
        root.training = self.source.module.training
        group_counts, shapes = self._group_counts(), self._input_shapes()
        gone: set[str] = set()
        made: dict[int, nn.Module] = {}
        for path, module in self.source.module.named_modules(remove_duplicate=False):
            if not path or isinstance(module, fx.GraphModule):
                continue
            if id(module) in made:  # a second name of it, which only a closed box goes by
                if self._called(path):
                    put_module(root, path, made[id(module)])
                continue
            if path.rpartition(".")[0] in gone or self._is_gone(path, module):
                gone.add(path)
                continue
            own = {
                name: self.sliced[f"{path}.{name}"]
                for name in [*module._parameters, *module._buffers]
                if f"{path}.{name}" in self.sliced
            }
            taps = self.taps.get(f"{path}.weight")
            if taps is not None and not taps.alive.any():
                smaller = _container(module, own)  # what it gives is in the graph
            elif is_resizable_module(module) and not isinstance(module, nn.Sequential | nn.ModuleList):
                smaller = cut_module(module, own, group_counts.get(path), shapes.get(path))
                smaller._modules = {}
                if taps is not None:
                    taps.resize_(smaller)
            else:
                smaller = _container(module, own) if not self._called(path) else _shallow(module, own)
            smaller.training = module.training
            made[id(module)] = smaller
            put_module(root, path, smaller)
        for name in [*self.source.module._parameters, *self.source.module._buffers]:
            if name in self.sliced:
                put_tensor(root, name, self.sliced[name], self.source.module)
        return root

    def _is_gone(self, path: str, module: nn.Module) -> bool:
        """No call of it, or of a layer in it, is left, and so no tensor of it either."""
        if not self.dead.nodes or any(_within(called, path) for called in self.called[True]):
            return False
        own = [f"{path}.{name}" for name, _ in (*module.named_parameters(), *module.named_buffers())]
        if not own:
            return any(_within(called, path) for called in self.called[False])
        return all(name in self.gone for name in own)

    def _called(self, path: str) -> bool:
        """A closed box: keeps its own class, and all below it."""
        boxes = {str(n.target) for n in self.source.module.graph.nodes if n.op == "call_module"}
        return any(path == box or path.startswith(box + ".") for box in boxes)

    def _sliced(self, tensors: dict[str, Tensor], present: Survivors | None) -> dict[str, Tensor]:
        sliced: dict[str, Tensor] = {}
        done: dict[int, Tensor] = {}
        for table in (self.positions.channels.params, self.positions.channels.buffers):
            for name, ids in table.items():
                if name in self.gone:
                    continue
                tensor = tensors[name]
                if id(tensor) not in done:
                    smaller = take(tensor, self.positions.survivors.kept_of(ids, present))
                    if name in self.taps:
                        smaller = self.taps[name].weight(smaller)
                    if isinstance(tensor, nn.Parameter):
                        smaller = nn.Parameter(smaller, tensor.requires_grad)
                    done[id(tensor)] = smaller
                sliced[name] = done[id(tensor)]
        return sliced

    def _input_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape, after the cut, of what each layer is called with."""
        shapes = {}
        for node in self.source.module.graph.nodes:
            if node.op == "call_module" and node.args and isinstance(node.args[0], fx.Node):
                x = node.args[0]
                if self.positions.is_tensor(x) and x.name not in self.skipped and node.name not in self.skipped:
                    kept = [self.positions.kept(x, axis) for axis in range(len(self.positions.before(x)))]
                    sizes = zip(kept, self.positions.before(x), strict=True)
                    shapes[str(node.target)] = tuple(size if k is None else len(k) for k, size in sizes)
        return shapes

    def _group_counts(self) -> dict[str, int]:
        counts = {}
        for node in self.source.module.graph.nodes:
            if (
                node.op == "call_module"
                and node.name in self.positions.channels.grouping
                and node.name not in self.dead.nodes
            ):
                module = self.source.module.get_submodule(str(node.target))
                before = getattr(module, "groups", None) or getattr(module, "num_groups", 1)
                counts[str(node.target)] = self.positions.groups(node, before)
        return counts

    def attach_rest(self, compact: fx.GraphModule, root: nn.Module) -> None:
        """Tensors the graph does not use stay too, under their names."""
        for path, module in root.named_modules():
            if path and not has_module(compact, path):
                compact.add_submodule(path, module)
        for name, tensor in self.sliced.items():
            if find(compact, name) is None:
                put_tensor(compact, name, tensor, self.source.module)
        for path, module in root.named_modules():
            compact.get_submodule(path)._non_persistent_buffers_set |= module._non_persistent_buffers_set
        put_in_order(compact, self.source.module)
        compact.train(self.source.module.training)
        for path, module in self.source.module.named_modules():
            if path and has_module(compact, path):
                compact.get_submodule(path).training = module.training


def _within(path: str, parent: str) -> bool:
    return path == parent or path.startswith(parent + ".")


def _container(module: nn.Module, own: dict[str, Tensor]) -> nn.Module:
    plain = nn.Module()
    plain._parameters = {n: own.get(n) for n in module._parameters}  # type: ignore[assignment]
    plain._buffers = {n: own.get(n) for n in module._buffers}
    plain._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    return plain


def _shallow(module: nn.Module, own: dict[str, Tensor]) -> nn.Module:
    smaller = copy.copy(module)
    smaller._parameters = {n: own.get(n) for n in module._parameters}  # type: ignore[assignment]
    smaller._buffers = {n: own.get(n) for n in module._buffers}
    smaller._modules = {}
    return smaller
