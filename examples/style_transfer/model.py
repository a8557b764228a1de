"""The N-style transfer network of Dumoulin et al., "A learned representation for artistic style" (ICLR 2017)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class ConditionalInstanceNorm2d(nn.Module):
    """Instance normalisation with a scale and a shift per style."""

    def __init__(self, channels: int, styles: int) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm2d(channels)
        self.scale = nn.Embedding(styles, channels)
        self.shift = nn.Embedding(styles, channels)
        nn.init.ones_(self.scale.weight)
        nn.init.zeros_(self.shift.weight)

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        """`style`: one index per image."""
        scale, shift = self.scale(style)[:, :, None, None], self.shift(style)[:, :, None, None]
        return self.norm(x) * scale + shift


class ConvNorm(nn.Module):
    """Reflection padding, convolution, conditional normalisation."""

    def __init__(self, inputs: int, outputs: int, kernel: int, styles: int, stride: int = 1) -> None:
        super().__init__()
        self.pad = nn.ReflectionPad2d(kernel // 2)
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, bias=False)
        self.norm = ConditionalInstanceNorm2d(outputs, styles)

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        return self.norm(self.conv(self.pad(x)), style)


class Residual(nn.Module):
    def __init__(self, channels: int, styles: int) -> None:
        super().__init__()
        self.conv1 = ConvNorm(channels, channels, 3, styles)
        self.conv2 = ConvNorm(channels, channels, 3, styles)
        nn.init.zeros_(self.conv2.norm.scale.weight)  # begin as the identity: a deep net learns faster so

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.conv1(x, style)), style)


class StyleNet(nn.Module):
    """Images in [0, 1] and the number of a style per image -> images in [0, 1]. Sizes are multiples of 4."""

    def __init__(self, styles: int = 5, width: int = 32, blocks: int = 5) -> None:
        super().__init__()
        self.conv1 = ConvNorm(3, width, 9, styles)
        self.conv2 = ConvNorm(width, 2 * width, 3, styles, stride=2)
        self.conv3 = ConvNorm(2 * width, 4 * width, 3, styles, stride=2)
        self.residuals = nn.ModuleList(Residual(4 * width, styles) for _ in range(blocks))
        self.expand = nn.Upsample(scale_factor=2, mode="nearest")
        self.up1 = ConvNorm(4 * width, 2 * width, 3, styles)
        self.up2 = ConvNorm(2 * width, width, 3, styles)
        self.last = ConvNorm(width, 3, 9, styles)

    def forward(self, image: Tensor, style: Tensor) -> Tensor:
        x = F.relu(self.conv1(image, style))
        x = F.relu(self.conv2(x, style))
        x = F.relu(self.conv3(x, style))
        for block in self.residuals:
            x = block(x, style)
        x = F.relu(self.up1(self.expand(x), style))
        x = F.relu(self.up2(self.expand(x), style))
        return self.last(x, style).sigmoid()
