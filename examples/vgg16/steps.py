"""The four parts of the experiment. Each leaves result.json in a folder of its own, and is passed over where that is.

tune      the convolutions of ImageNet, trained on CIFAR-10
gates     the weights of `tune` stay; gates close down to a share of the parameters, anew for each share
joint     weights and gates together, down to one share
further   the weights of `tune` without gates, trained for as many steps as `joint`: what the steps alone bring
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import tgfx
from examples.cifar10 import data
from examples.curve_figure import draw
from examples.resnet56.losses import LOSSES
from examples.resnet56.run import accuracy
from examples.stage import Stage, digest, read_json

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
    gate_loss: str = "labels"  # or see examples/resnet56/losses.py
    shares: list[float] = field(default_factory=lambda: [0.5, 0.3, 0.2, 0.1])
    recalibrate: int = 60  # batches
    seed: int = 0
    bf16: bool = False  # train in bfloat16 (autocast); accuracies are of float32

    def of(self, step: str) -> dict[str, Any]:
        """Those that this step depends on."""
        return {name: getattr(self, name) for name in (*DEPENDS[step], "seed", "bf16")}


DEPENDS = {
    "tune": ("batch", "tune_steps", "tune_lr"),
    "further": ("batch", "joint_steps", "joint_lr"),
    "gates": ("gate_batch", "gate_steps", "gate_loss", "recalibrate"),
    "joint": ("batch", "joint_steps", "joint_lr", "close"),
}


@dataclass
class Experiment:
    """The model as it starts, the images, and a folder for what comes out."""

    make: Callable[[], nn.Module]
    train: data.Images
    test: data.Images
    out: Path
    settings: Settings
    beside: Sequence[Path] = ()  # other such folders, whose nets are drawn into the figure of this one
    show: bool = True
    augment: bool = True

    # -- without gates --------------------------------------------------------------------------------------

    def tune(self, start: Callable[[nn.Module, data.Images], None]) -> dict[str, Any]:
        """`start`: fills in the weights to begin with."""
        model = self.make()
        start(model, self.train)
        return self._plainly(model, "tune", self.settings.tune_steps, self.settings.tune_lr)

    def further(self) -> dict[str, Any]:
        return self._plainly(self._tuned(), "further", self.settings.joint_steps, self.settings.joint_lr)

    def _plainly(self, model: nn.Module, name: str, steps: int, lr: float) -> dict[str, Any]:
        """Train the weights with all gates open: step for step what the model itself does, and it can be resumed."""
        stage = self._stage(name, model)
        done = stage.begin()
        if done is not None:
            return self._told(name, done)
        gated = tgfx.transform(model, torch.zeros(EXAMPLE))
        result = self._fit(stage, gated, budget=None, steps=steps, lr=lr)
        model.load_state_dict(tgfx.shrink(gated).state_dict())
        torch.save(model.state_dict(), self.out / name / "model.pt")
        found = {"steps": steps, "weights": sum(p.numel() for p in model.parameters())}
        right = accuracy(model, self.test)
        return self._told(name, stage.write({**found, "accuracy": right, "seconds": round(result.seconds)}))

    # -- with gates -----------------------------------------------------------------------------------------

    def gates(self) -> dict[str, Any]:
        """One run for each share, each from the whole model."""
        for folder in self.beside:
            line_of(folder)  # before hours of training, not after
        found = {f"gates-{share:g}": self._closed(share) for share in self.settings.shares}
        draw(
            lines_of([self.out, *self.beside]),
            self.out / "gates.svg",
            title="test accuracy, weights frozen",
            unit="weights",
        )
        return found

    def _closed(self, share: float) -> dict[str, Any]:
        own, model, name = self.settings, self._tuned(), f"gates-{share:g}"
        stage = self._stage(name, model)
        done = stage.begin()
        if done is not None:
            return self._told(name, done)
        gated = tgfx.transform(model, torch.zeros(EXAMPLE), granularity="weight")
        result = self._fit(
            stage,
            gated,
            budget={"params": share},
            steps=own.gate_steps,
            train="gates",
            **self._gate_loss(model),
            recalibrate=own.recalibrate,
            batch=own.gate_batch,
        )
        return self._told(name, stage.write({**self._cut(gated, share, name), "seconds": round(result.seconds)}))

    def _gate_loss(self, model: nn.Module) -> dict[str, Any]:
        name = self.settings.gate_loss
        return {} if name == "labels" else {"training_step": LOSSES[name](model)}

    def joint(self, share: float) -> dict[str, Any]:
        name, own, model = f"joint-{share:g}", self.settings, self._tuned()
        stage = self._stage(name, model)
        done = stage.begin()
        if done is not None:
            return self._told(name, done)
        gated = tgfx.transform(model, torch.zeros(EXAMPLE), granularity="weight")
        schedule = tgfx.Schedule(own.joint_steps, close=own.close, hold=min(1.0, own.close + 0.1))
        result = self._fit(
            stage, gated, budget={"params": share}, steps=own.joint_steps, lr=own.joint_lr, schedule=schedule
        )
        return self._told(name, stage.write({**self._cut(gated, share, name), "seconds": round(result.seconds)}))

    def _cut(self, gated: tgfx.GatedModule, share: float, name: str) -> dict[str, Any]:
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
            "change": after - self._result("tune")["accuracy"],
            "file_apart": apart,  # largest difference of the gated model and the file, of the largest answer
            "kept": {group: gate.open_count() / gate.weight.numel() for group, gate in gated.gates.items()},
            **sizes,
        }

    # -- shared ---------------------------------------------------------------------------------------------

    def _fit(
        self, stage: Stage, gated: tgfx.GatedModule, *, batch: int | None = None, **options: Any
    ) -> tgfx.FitResult:
        own = self.settings
        loader = data.Batches(self.train, batch or own.batch, augment=self.augment, seed=own.seed)
        if "training_step" not in options:
            options["loss_fn"] = F.cross_entropy
        result = tgfx.fit(
            gated,
            loader,
            **options,
            amp=torch.bfloat16 if own.bf16 else None,
            checkpoint=stage.checkpoint,
            checkpoint_every=100,
            log=stage.folder / "log",
            log_every=10,
            progress=self.show,
            seed=own.seed,
        )
        stage.trained(result)
        return result

    def _stage(self, name: str, model: nn.Module) -> Stage:
        """`model`: as the stage begins."""
        images = [self.train.digest, self.test.digest]
        asked = {"settings": self.settings.of(name.partition("-")[0]), "begins": digest(model), "images": images}
        return Stage(self.out / name, asked)

    def _told(self, name: str, found: dict[str, Any]) -> dict[str, Any]:
        if self.show:
            left_out = ("kept", "settings", "begins", "images")
            print(name, {key: value for key, value in found.items() if key not in left_out}, flush=True)
        return found

    def _result(self, name: str) -> dict[str, Any]:
        file = self.out / name / "result.json"
        if not file.is_file():
            raise SystemExit(f"{file} is missing: run the step {name!r} first")
        return read_json(file)

    def _tuned(self) -> nn.Module:
        self._result("tune")
        model = self.make()
        try:
            model.load_state_dict(torch.load(self.out / "tune" / "model.pt", weights_only=True))
        except RuntimeError as error:
            raise SystemExit(
                f"{self.out} holds another net: is it the one with --fully, or without? ({error})"
            ) from error
        return model


def lines_of(folders: Sequence[Path]) -> dict[str, list[tuple[float, float]]]:
    labels = [label_of(folder) for folder in folders]
    alike = {label for label in labels if labels.count(label) > 1}
    names = [f"{own} ({folder.name})" if own in alike else own for own, folder in zip(labels, folders, strict=True)]
    return {name: line_of(folder) for name, folder in zip(names, folders, strict=True)}


def label_of(folder: Path) -> str:
    """How large the net is, and how long its gates were trained at each share."""
    weights = read_json(folder / "tune" / "result.json")["weights"]
    lengths = {read_json(file)["settings"]["gate_steps"] for file in folder.glob("gates-*/result.json")}
    steps = f", {' and '.join(map(str, sorted(lengths)))} steps" if lengths else ""
    return f"{weights / 1e6:.1f} million weights{steps}"


def line_of(folder: Path) -> list[tuple[float, float]]:
    """(share of the parameters, accuracy) of the whole net and of what `gates` has left there, from large to small."""
    file = folder / "tune" / "result.json"
    if not file.is_file():
        raise SystemExit(f"{file} is missing: {folder} is no folder in which `tune` was run")
    whole, cuts = read_json(file)["accuracy"], [read_json(file) for file in folder.glob("gates-*/result.json")]
    return [(1.0, whole), *sorted(((cut["params"], cut["accuracy"]) for cut in cuts), reverse=True)]
