"""One colour per group, far from those of its neighbours; the page uses the same hues."""

from __future__ import annotations

import colorsys

GOLDEN = 137.508  # degrees: consecutive groups never look alike


def group_colour(index: int, lightness: float = 0.8) -> str:
    red, green, blue = colorsys.hls_to_rgb((index * GOLDEN % 360) / 360, lightness, 0.6)
    return "#{:02x}{:02x}{:02x}".format(*(round(255 * part) for part in (red, green, blue)))
