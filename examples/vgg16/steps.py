"""The four parts of the experiment. Each leaves result.json in a folder of its own, and is passed over where that is.

tune      the convolutions of ImageNet, trained on CIFAR-10
gates     the weights of `tune` stay; gates close down to one share of the parameters after the other
joint     weights and gates together, down to one share
further   the weights of `tune` without gates, trained for as many steps as `joint`: what the steps alone bring
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import tgfx
from examples.cifar10 import data
from examples.curve_figure import draw
from examples.finished import check_finished, load_finished_
from examples.resnet56.losses import LOSSES
from examples.resnet56.run import accuracy

EXAMPLE = (1, 3, 32, 32)


@dataclass
class Settings:
    """How long and how fast; the defaults are the full protocol."""

    batch: int = 128
    tune_steps: int = 1170  # 3 epochs
    tune_lr: float = 0.03
    joint_steps: int = 470  # 1.2 epochs
    joint_lr: float = 0.02
    close: float = 0.5  # share of the joint steps after which the budget is reached
    gate_steps: int = 100  # for each share
    gate_batch: int = 128
    gate_loss: str = "blur"  # see examples/resnet56/losses.py, or "labels"
    shares: list[float] = field(default_factory=lambda: [0.5, 0.3, 0.2, 0.1])
    recalibrate: int = 60  # batches
    seed: int = 0
    bf16: bool = False  # train in bfloat16 (autocast); accuracies are of float32


@dataclass
class Experiment:
    """The model as it starts, the images, and a folder for what comes out."""

    make: Callable[[], nn.Module]
    train: data.Images
    test: data.Images
    out: Path
    settings: Settings
    show: bool = True
    augment: bool = True

    # -- without gates --------------------------------------------------------------------------------------

    def tune(self, start: Callable[[nn.Module, data.Images], None]) -> dict[str, Any]:
        """`start`: fills in the weights to begin with."""
        own = self.settings

        def trained() -> dict[str, Any]:
            model = self.make()
            start(model, self.train)
            return self._plainly(model, "tune", own.tune_steps, own.tune_lr)

        return self._once("tune", trained)

    def further(self) -> dict[str, Any]:
        own = self.settings
        return self._once("further", lambda: self._plainly(self._tuned(), "further", own.joint_steps, own.joint_lr))

    def _plainly(self, model: nn.Module, name: str, steps: int, lr: float) -> dict[str, Any]:
        """Train the weights with all gates open: step for step what the model itself does, and it can be resumed."""
        gated = tgfx.transform(model, torch.zeros(EXAMPLE))
        result = self._fit(gated, name, budget=None, steps=steps, lr=lr)
        model.load_state_dict(tgfx.shrink(gated).state_dict())
        torch.save(model.state_dict(), self.out / name / "model.pt")
        return {"steps": steps, "accuracy": accuracy(model, self.test), "seconds": round(result.seconds)}

    # -- with gates -----------------------------------------------------------------------------------------

    def gates(self) -> dict[str, Any]:
        """One run through all shares: each begins where the one before has ended."""
        model = self._tuned()
        gated = tgfx.transform(model, torch.zeros(EXAMPLE), granularity="weight")
        before = self._result("tune")["accuracy"]
        found: dict[str, Any] = {}
        for share in self.settings.shares:
            name = f"gates-{share:g}"

            def closed(share: float = share, name: str = name) -> dict[str, Any]:
                own = self.settings
                result = self._fit(
                    gated,
                    name,
                    budget={"params": share},
                    steps=own.gate_steps,
                    train="gates",
                    **self._gate_loss(model),
                    recalibrate=own.recalibrate,
                    batch=own.gate_batch,
                )
                return {**self._cut(gated, share, name, before), "seconds": round(result.seconds)}

            found[name] = self._once(name, closed)
            load_finished_(gated, self.out / name / "checkpoint.pt")
        line = [(1.0, before), *((cut["params"], cut["accuracy"]) for cut in found.values())]
        draw({"gates": line}, self.out / "gates.svg", title="test accuracy, weights frozen", unit="weights")
        return found

    def _gate_loss(self, model: nn.Module) -> dict[str, Any]:
        name = self.settings.gate_loss
        return {} if name == "labels" else {"training_step": LOSSES[name](model)}

    def joint(self, share: float) -> dict[str, Any]:
        name, own = f"joint-{share:g}", self.settings

        def trained() -> dict[str, Any]:
            gated = tgfx.transform(self._tuned(), torch.zeros(EXAMPLE), granularity="weight")
            schedule = tgfx.Schedule(own.joint_steps, close=own.close, hold=own.close + 0.1)
            result = self._fit(
                gated, name, budget={"params": share}, steps=own.joint_steps, lr=own.joint_lr, schedule=schedule
            )
            before = self._result("tune")["accuracy"]
            return {**self._cut(gated, share, name, before), "seconds": round(result.seconds)}

        return self._once(name, trained)

    def _cut(self, gated: tgfx.GatedModule, share: float, name: str, before: float) -> dict[str, Any]:
        """The plain model with zeros, what it answers, and what it takes on disk."""
        finished = tgfx.finish(gated, params=share)
        sparse, dense = self.out / name / "sparse.safetensors", self.out / name / "dense.safetensors"
        tgfx.save_sparse(finished.model, sparse)
        save_file(finished.model.state_dict(), dense)
        read = self.make()
        tgfx.load_sparse(sparse, read)
        images = next(iter(data.Batches(self.test.first(64), 64, augment=False)))[0]
        with torch.no_grad():
            answers = gated.eval()(images)
            apart = float((answers - read.eval()(images)).abs().max() / answers.abs().max())
        after = accuracy(read, self.test)
        sizes = {"dense_bytes": dense.stat().st_size, "sparse_bytes": sparse.stat().st_size}
        dense.unlink()
        return {
            "budget": share,
            "params": finished.ratio("params"),
            "flops": finished.ratio("flops"),
            "accuracy": after,
            "change": after - before,
            "file_apart": apart,  # largest difference of the gated model and the file, of the largest answer
            "kept": {group: gate.open_count() / gate.weight.numel() for group, gate in gated.gates.items()},
            **sizes,
        }

    # -- shared ---------------------------------------------------------------------------------------------

    def _fit(self, gated: tgfx.GatedModule, name: str, *, batch: int | None = None, **options: Any) -> tgfx.FitResult:
        own = self.settings
        loader = data.Batches(self.train, batch or own.batch, augment=self.augment, seed=own.seed)
        if "training_step" not in options:
            options["loss_fn"] = F.cross_entropy
        result = tgfx.fit(
            gated,
            loader,
            **options,
            amp=torch.bfloat16 if own.bf16 else None,
            checkpoint=self.out / name / "checkpoint.pt",
            checkpoint_every=100,
            log=self.out / name / "log",
            log_every=10,
            progress=self.show,
            seed=own.seed,
        )
        check_finished(result)
        return result

    def _once(self, name: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What stands in result.json; where there is none, `run` is run and its result written there."""
        file = self.out / name / "result.json"
        if not file.is_file():
            began = time.time()
            found = {**run(), "wall": round(time.time() - began), "settings": asdict(self.settings)}
            file.write_text(json.dumps(found, indent=1))
            (self.out / name / "checkpoint.pt.previous").unlink(missing_ok=True)
            if self.show:
                print(name, {key: value for key, value in found.items() if key not in ("kept", "settings")}, flush=True)
        return self._result(name)

    def _result(self, name: str) -> dict[str, Any]:
        file = self.out / name / "result.json"
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing: run the step {name!r} first")
        return json.loads(file.read_text())

    def _tuned(self) -> nn.Module:
        self._result("tune")
        model = self.make()
        model.load_state_dict(torch.load(self.out / "tune" / "model.pt", weights_only=True))
        return model
