"""A layer as a runtime sees it: everything that its time depends on but the number of channels that are left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Op = Literal["conv", "conv_transpose", "linear"]
Grouping = Literal["", "within", "across"]


@dataclass(frozen=True)
class LayerShape:
    """A convolution, transposed convolution or fully-connected layer with all its channels, at the example's size.

    batch: samples, or rows of a fully-connected layer. space: height and width of the input. grouping: what goes when
    channels go, whole groups ("within", as in a depthwise convolution) or the same positions of every group
    ("across"); "" where there is one group.
    """

    op: Op
    channels_in: int
    channels_out: int
    batch: int = 1
    space: tuple[int, ...] = ()
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    output_padding: tuple[int, ...] = ()
    groups: int = 1
    grouping: Grouping = ""
    dtype: str = "float32"

    @property
    def unit_in(self) -> int:
        """Input channels that go together."""
        return {"": 1, "within": self.channels_in // self.groups, "across": self.groups}[self.grouping]

    @property
    def unit_out(self) -> int:
        return {"": 1, "within": self.channels_out // self.groups, "across": self.groups}[self.grouping]

    @property
    def steps_in(self) -> int:
        """How many such units there are: the layer can be measured with 1 to this many."""
        return self.channels_in // self.unit_in

    @property
    def steps_out(self) -> int:
        return self.channels_out // self.unit_out

    def groups_with(self, channels_in: int) -> int:
        """Groups that are left with this many input channels."""
        return channels_in // self.unit_in if self.grouping == "within" else self.groups

    def __str__(self) -> str:
        size = "x".join(map(str, self.space)) or f"{self.batch} rows"
        window = "x".join(map(str, self.kernel))
        return f"{self.op} {window} {self.channels_in}->{self.channels_out} at {size}".replace("  ", " ")
