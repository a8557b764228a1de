"""Write the pages of ResNet-18, DenseNet-121 and a ViT, and the pictures of them in the README.

python -m examples.view.screenshots [FOLDER]      pages go to FOLDER (default: a temporary one), pictures to docs/
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import tgfx
from examples.zoo import loading  # noqa: F401  (torchvision can be imported after it)
from tests.support.browser import chromium, open_page, wait_for, what_is_missing
from tests.support.view_models import close_some_

PICTURES = Path(__file__).parent.parent.parent / "docs"
SIZE = "--window-size=1360,880"


@dataclass(frozen=True)
class Shot:
    """open: modules to open first; look: the place that is brought to the middle, and the zoom."""

    name: str
    factory: str
    theme: str
    tab: str
    colour: str = "group"
    group: str | None = None
    open: tuple[str, ...] = ()
    look: tuple[str, float] | None = None


SHOTS = (
    Shot("resnet18", "resnet18", "light", "groups", group="conv1", look=("layer1.0.conv2", 0.8)),
    Shot("densenet121", "densenet121", "dark", "overview", colour="flops"),
    Shot(
        "vit", "vit_b_16", "light", "details", group="encoder.layers.encoder_layer_0.self_attention#2",
        open=("encoder.layers.encoder_layer_0",), look=("scaled_dot_product_attention", 0.72),
    ),
)  # fmt: skip

_PREPARE = """
const done = arguments[1], shot = arguments[0], view = window.tgfxView;
(async () => {
  shot.open.forEach((path) => view.state.expanded.add(path));
  if (shot.open.length) await view.relayout();
  const nodes = view.data.nodes;
  if (shot.group) view.select({ kind: "group", id: view.data.groups.findIndex((one) => one.name === shot.group) });
  if (shot.look) view.centre("n" + nodes.findIndex((one) => one.path === shot.look[0]), shot.look[1]);
  document.activeElement.blur();
  setTimeout(done, 500);
})();
"""


def main() -> None:
    missing = what_is_missing()
    if missing is not None:
        sys.exit(missing)
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    PICTURES.mkdir(exist_ok=True)
    with chromium(SIZE) as driver:
        for shot in SHOTS:
            page = tgfx.visualize(_gated(shot.factory), folder / f"{shot.name}.html", budget={"flops": 0.4})
            open_page(driver, page, f"#th={shot.theme}&t={shot.tab}&c={shot.colour}")
            driver.execute_async_script(_PREPARE, {"open": shot.open, "group": shot.group, "look": shot.look})
            wait_for(driver, "document.getElementById('busy').hidden", "the layout")
            driver.save_screenshot(str(PICTURES / f"view-{shot.name}.png"))
            print(f"written: {page}, docs/view-{shot.name}.png")


def _gated(factory: str) -> nn.Module:
    """Gates are closed at random here: the pictures show the page, not a result."""
    import torchvision

    make: Callable[[], nn.Module] = getattr(torchvision.models, factory)
    gated = tgfx.transform(make(), torch.randn(1, 3, 224, 224)).eval()
    close_some_(gated, share=0.4)
    return gated


if __name__ == "__main__":
    main()
