"""FlowNetSimple (Dosovitskiy et al., ICCV 2015): two images stacked in, optical flow out."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class FlowNetSimple(nn.Module):
    """Flow from the first image of a pair to the second, in units of `SCALE` pixels.

    Takes (n, 6, h, w), h and w multiples of 64. In train mode it returns the flows of all five scales, 1/4 to 1/64 of
    the size, finest first; in eval mode the finest only. width=1 is the published net (64 to 1024 channels).
    """

    SCALE = 20.0  # the ground truth is divided by it, as in the published training

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()

        def channels(count: int) -> int:
            return max(1, round(count * width))

        c1, c2, c3, c4, c5, c6 = (channels(count) for count in (64, 128, 256, 512, 512, 1024))
        d5, d4, d3, d2 = (channels(count) for count in (512, 256, 128, 64))
        self.conv1 = conv(6, c1, kernel=7, stride=2)
        self.conv2 = conv(c1, c2, kernel=5, stride=2)
        self.conv3 = conv(c2, c3, kernel=5, stride=2)
        self.conv3_1 = conv(c3, c3)
        self.conv4 = conv(c3, c4, stride=2)
        self.conv4_1 = conv(c4, c4)
        self.conv5 = conv(c4, c5, stride=2)
        self.conv5_1 = conv(c5, c5)
        self.conv6 = conv(c5, c6, stride=2)
        self.conv6_1 = conv(c6, c6)

        self.deconv5 = deconv(c6, d5)
        self.deconv4 = deconv(c5 + d5 + 2, d4)
        self.deconv3 = deconv(c4 + d4 + 2, d3)
        self.deconv2 = deconv(c3 + d3 + 2, d2)

        self.predict_flow6 = predict_flow(c6)
        self.predict_flow5 = predict_flow(c5 + d5 + 2)
        self.predict_flow4 = predict_flow(c4 + d4 + 2)
        self.predict_flow3 = predict_flow(c3 + d3 + 2)
        self.predict_flow2 = predict_flow(c2 + d2 + 2)

        self.upsampled_flow6_to_5 = upsampled_flow()
        self.upsampled_flow5_to_4 = upsampled_flow()
        self.upsampled_flow4_to_3 = upsampled_flow()
        self.upsampled_flow3_to_2 = upsampled_flow()

        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                nn.init.kaiming_normal_(module.weight, 0.1)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, pair: Tensor) -> Tensor | tuple[Tensor, ...]:
        out_conv2 = self.conv2(self.conv1(pair))
        out_conv3 = self.conv3_1(self.conv3(out_conv2))
        out_conv4 = self.conv4_1(self.conv4(out_conv3))
        out_conv5 = self.conv5_1(self.conv5(out_conv4))
        out_conv6 = self.conv6_1(self.conv6(out_conv5))

        flow6 = self.predict_flow6(out_conv6)
        concat5 = torch.cat((out_conv5, self.deconv5(out_conv6), self.upsampled_flow6_to_5(flow6)), 1)
        flow5 = self.predict_flow5(concat5)
        concat4 = torch.cat((out_conv4, self.deconv4(concat5), self.upsampled_flow5_to_4(flow5)), 1)
        flow4 = self.predict_flow4(concat4)
        concat3 = torch.cat((out_conv3, self.deconv3(concat4), self.upsampled_flow4_to_3(flow4)), 1)
        flow3 = self.predict_flow3(concat3)
        concat2 = torch.cat((out_conv2, self.deconv2(concat3), self.upsampled_flow3_to_2(flow3)), 1)
        flow2 = self.predict_flow2(concat2)
        if self.training:
            return flow2, flow3, flow4, flow5, flow6
        return flow2


def conv(inside: int, outside: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, kernel, stride, padding=(kernel - 1) // 2), nn.LeakyReLU(0.1, inplace=True)
    )


def deconv(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(
        nn.ConvTranspose2d(inside, outside, kernel_size=4, stride=2, padding=1), nn.LeakyReLU(0.1, inplace=True)
    )


def predict_flow(inside: int) -> nn.Conv2d:
    return nn.Conv2d(inside, 2, kernel_size=3, padding=1)


def upsampled_flow() -> nn.ConvTranspose2d:
    return nn.ConvTranspose2d(2, 2, kernel_size=4, stride=2, padding=1, bias=False)
