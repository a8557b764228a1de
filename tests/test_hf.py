"""GateCallback in real runs of transformers' Trainer: budget, logs, checkpoints, mistakes."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.support.torchvision_ops  # noqa: F401  before transformers
import tgfx
from tests.support import promises
from tgfx.errors import MissingPackageError, OptimizerError, TrainingError

transformers = pytest.importorskip("transformers", reason="transformers is an optional package")
pytest.importorskip("accelerate", reason="accelerate is an optional package, and the Trainer needs it")

from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments  # noqa: E402

from tgfx.hf import STATE, GateCallback  # noqa: E402

WORDS, LENGTH = 20, 8


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    return BertForSequenceClassification(
        BertConfig(vocab_size=WORDS, max_position_embeddings=16, num_labels=2, **sizes)  # type: ignore[arg-type]
    )


def data(count: int = 48) -> list[dict[str, Any]]:
    """Are there more small words than large ones?"""
    words = torch.randint(0, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(LENGTH, dtype=torch.long)
    return [{"input_ids": w, "attention_mask": mask, "labels": int((w < 10).sum() > 4)} for w in words]


def batch(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([torch.as_tensor(item[name]) for item in items]) for name in items[0]}


@pytest.fixture(scope="module")
def whole() -> tgfx.GatedModule:
    return tgfx.transform(bert(), batch(data(2)))


@pytest.fixture
def gated(whole: tgfx.GatedModule) -> tgfx.GatedModule:
    return copy.deepcopy(whole)


def trainer(gated: Any, callback: GateCallback, folder: Path, **options: Any) -> Trainer:
    quiet = dict(report_to=[], use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False)
    options = {"max_steps": 20, "save_strategy": "no", **quiet, **options}
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=8, logging_steps=5, learning_rate=1e-3, **options
    )
    return Trainer(model=gated, args=arguments, train_dataset=data(), eval_dataset=data(8), callbacks=[callback])


def test_labels_in_keywords_and_model_output_out(gated: tgfx.GatedModule) -> None:
    model = bert().eval()
    items = batch(data(5))  # another batch size than the example's
    with torch.no_grad():
        expected, found = model(**items), gated.eval()(**items)
    assert type(found) is type(expected)
    promises.assert_close(found.loss, expected.loss, 1e-6, "loss")
    promises.assert_close(found.logits, expected.logits, 1e-6, "logits")


def test_gradient_checkpointing_changes_nothing_but_memory(gated: tgfx.GatedModule, tmp_path: Path) -> None:
    twin = copy.deepcopy(gated)
    for model, recompute in ((gated, False), (twin, True)):
        torch.manual_seed(0)
        trainer(model, GateCallback({"flops": 0.5}), tmp_path, max_steps=6, gradient_checkpointing=recompute).train()
        assert model.is_gradient_checkpointing is recompute
    for (name, expected), found in zip(gated.named_parameters(), twin.parameters(), strict=True):
        promises.assert_close(found.detach(), expected.detach(), 1e-6, name)


def test_checkpoints_switched_on_before_are_warned_about() -> None:
    model = bert()
    model.gradient_checkpointing_enable()
    with pytest.warns(UserWarning, match="uses gradient checkpointing, which its gated copy does not"):
        tgfx.transform(model.train(), batch(data(2)))


def test_meets_the_budget_and_logs(gated: tgfx.GatedModule, tmp_path: Path) -> None:
    callback = GateCallback({"flops": 0.5})
    run = trainer(gated, callback, tmp_path)
    run.train()
    assert callback.controller is not None and callback.controller.taken == 20
    assert callback.controller.schedule.steps == 20 and callback.controller.closed
    logged = [entry for entry in run.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logged] == [5, 10, 15, 20]
    assert all({"ratio_flops", "target_flops", "channels", "phase"} <= set(entry) for entry in logged)
    assert logged[-1]["phase"] == 3 and logged[-1]["target_flops"] == 0.5
    promises.budget_is_used_up(gated, "flops", 0.5)
    assert "eval_loss" in run.evaluate(data(8))  # type: ignore[arg-type]
    items = batch(data(5))
    with torch.no_grad():
        promises.assert_close(tgfx.shrink(gated)(**items).logits, gated(**items).logits, 1e-5, "compact logits")


def test_single_weights(tmp_path: Path) -> None:
    gated = tgfx.transform(bert(), batch(data(2)), granularity="weight")
    twin = copy.deepcopy(gated)
    callback, saving = GateCallback({"params": 0.6}), {"save_strategy": "steps", "save_steps": 8}
    run = trainer(gated, callback, tmp_path, **saving)
    run.train()
    assert callback.controller is not None and callback.controller.taken == 20 and callback.controller.closed
    logged = [entry for entry in run.state.log_history if "loss" in entry]
    assert logged[-1]["phase"] == 3 and logged[-1]["target_params"] == 0.6
    assert logged[-1]["channels"] == sum(gate.open_count() for gate in gated.gates.values())
    assert 0.59 < gated.eval().ratio("params").item() <= 0.6
    trainer(twin, GateCallback({"params": 0.6}), tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    for name, gate in twin.gates.items():
        assert torch.equal(gate.is_open(), gated.gates[name].is_open()), name


def test_single_weights_whose_training_ends_early(tmp_path: Path) -> None:
    gated = tgfx.transform(bert(), batch(data(2)), granularity="weight")
    callback = GateCallback({"params": 0.6}, schedule=tgfx.Schedule(50))
    with pytest.warns(UserWarning, match="after 10 of 50 steps"):
        trainer(gated, callback, tmp_path, max_steps=10).train()
    assert 0.59 < gated.eval().ratio("params").item() <= 0.6


def test_bfloat16(gated: tgfx.GatedModule, tmp_path: Path) -> None:
    trainer(gated, GateCallback({"flops": 0.5}), tmp_path, max_steps=6, bf16=True).train()
    promises.budget_is_used_up(gated, "flops", 0.5)
    compact = tgfx.finish(gated, flops=0.5).model  # though the Trainer leaves its autocast over the model's forward
    assert sum(p.numel() for p in compact.parameters()) == gated.cost("params").item()


def test_accumulated_batches_are_one_step(gated: tgfx.GatedModule, tmp_path: Path) -> None:
    callback = GateCallback({"flops": 0.6})
    trainer(gated, callback, tmp_path, max_steps=6, gradient_accumulation_steps=2).train()
    assert callback.controller is not None and callback.controller.taken == 6
    assert callback.controller.phase == "hold"


def test_resumes_from_the_trainers_checkpoint(gated: tgfx.GatedModule, tmp_path: Path) -> None:
    twin = copy.deepcopy(gated)
    saving = {"save_strategy": "steps", "save_steps": 8}
    trainer(gated, GateCallback({"flops": 0.5}), tmp_path, **saving).train()
    assert (tmp_path / "checkpoint-8" / STATE).is_file()
    callback = GateCallback({"flops": 0.5})
    trainer(twin, callback, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert callback.controller is not None and callback.controller.taken == 20
    assert (twin.open_slots() == gated.open_slots()).all()
    for (name, expected), found in zip(gated.state_dict().items(), twin.state_dict().values(), strict=True):
        promises.assert_close(found, expected, 1e-6, name)


def test_gets_smaller_while_training_and_resumes_small(gated: tgfx.GatedModule, tmp_path: Path) -> None:
    twin, whole = copy.deepcopy(gated), sum(p.numel() for p in gated.parameters())
    saving = {"save_strategy": "steps", "save_steps": 16}
    trainer(gated, GateCallback({"flops": 0.5}, compact_every=4), tmp_path, **saving).train()
    assert sum(p.numel() for p in gated.parameters()) < whole
    promises.budget_is_used_up(gated, "flops", 0.5)
    callback = GateCallback({"flops": 0.5}, compact_every=4)
    trainer(twin, callback, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-16"))
    assert callback.controller is not None and callback.controller.taken == 20
    for (name, expected), found in zip(gated.state_dict().items(), twin.state_dict().values(), strict=True):
        promises.assert_close(found, expected, 1e-6, name)


def test_sizes_are_multiples(gated: tgfx.GatedModule, tmp_path: Path) -> None:
    trainer(gated, GateCallback({"flops": 0.6}, round_to=4), tmp_path).train()
    sizes = {group.name: group.size for group in gated.groups}
    assert all(gate.open_count() % 4 == 0 or gate.open_count() == sizes[n] for n, gate in gated.gates.items())
    assert gated.ratio("flops").item() <= 0.6


def test_resuming_without_the_state_is_an_error(gated: tgfx.GatedModule, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 8}
    trainer(gated, GateCallback({"flops": 0.5}), tmp_path, **saving).train()
    (tmp_path / "checkpoint-8" / STATE).rename(tmp_path / STATE)
    run = trainer(gated, GateCallback({"flops": 0.5}), tmp_path)
    with pytest.raises(TrainingError, match="resume_from"):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    run = trainer(gated, GateCallback({"flops": 0.5}, resume_from=tmp_path), tmp_path)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))


def test_an_optimizer_without_the_gates(gated: tgfx.GatedModule, tmp_path: Path) -> None:
    run = trainer(gated, GateCallback({"flops": 0.5}), tmp_path)
    run.optimizer = torch.optim.SGD(gated.get_submodule("classifier").parameters(), lr=0.1)
    with pytest.raises(OptimizerError, match="does not hold the gates"):
        run.train()


def test_choosing_the_best_checkpoint_is_warned_about(gated: tgfx.GatedModule, tmp_path: Path) -> None:
    options = dict(eval_strategy="steps", save_strategy="steps", eval_steps=2, save_steps=2, max_steps=2)
    callback = GateCallback({"flops": 0.5}, steps=50)
    run = trainer(gated, callback, tmp_path, load_best_model_at_end=True, **options)
    with pytest.warns(UserWarning, match="before the budget was met"):
        run.train()


@pytest.mark.parametrize("missing", ["transformers", "accelerate"])
def test_without_the_package(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "tgfx.hf")
    with pytest.raises(MissingPackageError, match=r"pip install tgfx\[hf\]"):
        import tgfx.hf  # noqa: F401
