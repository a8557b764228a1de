"""Analysis: what each node needs, in-place changes included.

    b = zeros(n); v = b[:, :2]; v.add_(1); c = conv(b)      conv needs b, and add_ through b

A node needs its arguments as they are by then, and so every earlier node that wrote into their memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from tgfx.ir.autocast_switch import is_switch
from tgfx.ir.dead_code import has_effect
from tgfx.ops.naming import op_name


class Demand:
    """Arguments of a node, each with the changes that it has seen; `roots` are needed for their own sake."""

    def __init__(self, module: fx.GraphModule, graph: fx.Graph | None = None) -> None:
        """`graph`: over the module's layers, if it is not the module's own."""
        self.module = module
        self.order = {node: index for index, node in enumerate((graph or module.graph).nodes)}
        self.roots = [node for node in self.order if node.op in ("output", "placeholder") or is_switch(node)]
        self._changes: dict[tuple[fx.Node, fx.Node], list[fx.Node]] = {}
        self._changed: dict[fx.Node, list[fx.Node]] = {}
        for node in self.order:
            if self.writes(node):
                self._note(node)

    def inputs(self, node: fx.Node) -> Iterator[fx.Node]:
        """All that a node needs."""
        for arg in node.all_input_nodes:
            yield from self.operand(node, arg)

    def operand(self, node: fx.Node, arg: fx.Node) -> list[fx.Node]:
        """One argument, and what wrote into it before."""
        return [arg, *self._changes.get((node, arg), ())]

    def reach(self, start: Iterable[fx.Node]) -> set[fx.Node]:
        """All that these nodes need, and themselves."""
        reached, stack = set(start), list(start)
        while stack:
            for arg in self.inputs(stack.pop()):
                if arg not in reached:
                    reached.add(arg)
                    stack.append(arg)
        return reached

    def is_written_after(self, value: fx.Node, node: fx.Node) -> bool:
        """Whether something later than `node` writes into the memory of `value`."""
        return any(self.order[change] > self.order[node] for change in self._changed.get(value, ()))

    def writes(self, node: fx.Node) -> bool:
        """Whether a node acts in place."""
        return (
            node.op.startswith("call") and not is_check(node) and not is_switch(node) and has_effect(node, self.module)
        )

    def _note(self, change: fx.Node) -> None:
        written = change.args[0] if change.args else change.kwargs.get("input")
        if not isinstance(written, fx.Node):
            self.roots.append(change)  # nobody knows what it does
            return
        base = written
        while self._shares_memory(base) and base.all_input_nodes:
            base = base.all_input_nodes[0]
        if base.op in ("placeholder", "get_attr"):
            self.roots.append(change)  # seen by the caller, or in the next call
        aliases, stack = {base}, [base]
        while stack:
            for user in stack.pop().users:
                if user not in aliases and self._shares_memory(user):
                    aliases.add(user)
                    stack.append(user)
        for alias in aliases:
            self._changed.setdefault(alias, []).append(change)
            for user in alias.users:
                if self.order[user] > self.order[change] and alias is not change:
                    self._changes.setdefault((user, alias), []).append(change)

    def _shares_memory(self, node: fx.Node) -> bool:
        return op_name(node, self.module) in _VIEWS or self.writes(node)


def is_check(node: fx.Node) -> bool:
    """An assertion: kept where the values that it looks at are there anyway."""
    return node.op == "call_function" and getattr(node.target, "__name__", "").startswith(("_assert", "sym_constrain"))


# what gives (or may give) a value in the memory of its first argument
_VIEWS = {
    "view", "reshape", "flatten", "Flatten", "unflatten", "Unflatten", "transpose", "permute", "movedim", "squeeze",
    "unsqueeze", "expand", "contiguous", "getitem", "select", "slice", "narrow", "chunk", "split", "unbind", "detach",
    "alias", "Identity", "to", "float", "double", "half", "t", "Dropout", "Dropout1d", "Dropout2d", "Dropout3d",
    "dropout", "unfold", "split_with_sizes", "tensor_split", "view_as", "expand_as", "type_as", "diagonal", "real",
    "imag", "connect", "_to_copy", "swapaxes", "as_strided", "getattr", "numpy_T", "mT", "type", "hsplit", "vsplit",
    "dsplit", "ravel", "reshape_as", "view_as_real", "view_as_complex", "adjoint", "positive", "swapdims", "moveaxis",
    "unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes", "atleast_1d", "atleast_2d", "atleast_3d", "conj",
    "resolve_conj", "resolve_neg", "requires_grad", "bfloat16", "cpu", "cuda", "dropout1d", "dropout2d", "dropout3d",
    "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "AlphaDropout", "FeatureAlphaDropout", "sum_to_size",
    "broadcast_tensors", "as_tensor", "asarray",
}  # fmt: skip
