"""Heads of a Transformer that translates English into German (the paper's Table 4).

python -m examples.translation.run --data MULTI30K --out FOLDER             all steps, each begun or gone on with
python -m examples.translation.run --data MULTI30K --out FOLDER --step whole
python -m examples.translation.run --quick
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from examples.mistakes import without_traceback
from examples.options import count
from examples.stage import Stage, digest, make_folder
from examples.translation.data import padded
from examples.translation.model import END, START, Translator
from examples.translation.recipe import FULL, QUICK, Recipe
from examples.translation.speed import measure
from examples.translation.tasks import Made, Multi30k, Task
from examples.translation.training import train

Report = dict[str, Any]


class Experiment:
    """Its steps, in a folder: a step that has a result.json is done."""

    def __init__(self, task: Task, recipe: Recipe, out: Path, seed: int, quiet: bool) -> None:
        self.task, self.recipe, self.out, self.seed, self.quiet = task, recipe, out, seed, quiet

    def run(self, step: str) -> Report:
        others = {"whole": [], "speed": ["whole", *cuts_of(self.recipe)]}.get(step, ["whole"])
        models = {other: self._model(other) for other in others}
        begins = {other: digest(model) for other, model in models.items()}
        asked = {"step": step, "recipe": asdict(self.recipe), "seed": self.seed, "begins": begins}
        stage = Stage(self.out / step, {**asked, "sentences": self.task.train.digest})
        report = stage.begin()
        if report is None:
            figures = self._speed(models) if step == "speed" else self._trained(step, stage, models.get("whole"))
            report = stage.write(figures)
        if not self.quiet:
            print(json.dumps(report), flush=True)
        return report

    def _trained(self, step: str, stage: Stage, teacher: Translator | None) -> Report:
        model, report = train(
            self.task,
            self.recipe,
            keep=float(step.removeprefix("heads-")) if step.startswith("heads-") else None,
            teacher=teacher,
            stage=stage,
            seed=self.seed,
            quiet=self.quiet,
        )
        torch.save(model.state_dict(), self.out / step / "model.pt")
        return report | self.task.score(model)

    def _speed(self, models: dict[str, Translator]) -> Report:
        """Against `whole`: the same number of sentences and of pieces for every model."""
        order = sorted(range(len(self.task.held_out)), key=lambda i: len(self.task.held_out.source[i]))
        middle = order[len(order) // 2 :][:64]  # of usual length
        source = padded([[*self.task.held_out.source[i], END] for i in middle])
        target = padded([[START, *self.task.held_out.target[i]] for i in middle])
        return {"pieces_per_second": measure(models, source, target, self.recipe.speed_rounds)}

    def _model(self, step: str) -> Translator:
        file = self.out / step / "model.pt"
        if not file.is_file():
            raise SystemExit(f"{file} is missing: run --step {step} with the same --out first")
        weights = torch.load(file, weights_only=True)
        model = Translator(self.recipe.sizes(self.task.pieces).of(weights))
        model.load_state_dict(weights)
        return model


@without_traceback()
def main(arguments: Sequence[str] | None = None) -> dict[str, Report]:
    parser = _parser()
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            return _run(Experiment(Made(), QUICK, Path(folder), options.seed, options.quiet), None)
    if options.data is None:
        parser.error("--data is missing: a folder with Multi30k, see README.md; --quick needs none")
    make_folder(options.out)
    recipe = replace(FULL, steps=options.steps)
    task = Multi30k(options.data, options.out, recipe.pieces)
    return _run(Experiment(task, recipe, options.out, options.seed, options.quiet), options.step)


def cuts_of(recipe: Recipe) -> list[str]:
    return [f"heads-{share:g}" for share in recipe.keep]


def steps_of(recipe: Recipe) -> list[str]:
    """whole: all heads. taught: all heads, and taught by `whole` as the next are: what a teacher brings by itself.
    heads-x: gates close down to x of them while the model learns."""
    return ["whole", "taught", *cuts_of(recipe), "speed"]


def _run(experiment: Experiment, only: str | None) -> dict[str, Report]:
    return {step: experiment.run(step) for step in ([only] if only else steps_of(experiment.recipe))}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with Multi30k (see README.md)")
    parser.add_argument("--out", type=Path, default=Path("runs/translation"))
    parser.add_argument("--step", choices=steps_of(FULL), help="default: all, in this order")
    parser.add_argument("--steps", type=count, default=FULL.steps, help="of each training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=count, default=1)
    parser.add_argument("--quick", action="store_true", help="a small model and a made-up language, under a minute")
    parser.add_argument("--quiet", action="store_true")
    return parser


if __name__ == "__main__":
    main()
