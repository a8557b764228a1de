"""What each process of tests/test_distributed.py does: `python -m tests.support.distributed_run <what> <folder>`.

first: DDP from start to end, FSDP2 from start to end, then DDP again, in which rank 1 dies without a word.
second: the same DDP run resumes from the checkpoint of the dead one.
fit: tgfx.fit, which is for one process, before and after the processes know of each other.
compacted: DDP that removes channels on the way, whole, and again in two halves with a checkpoint between them.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, distributed

import tgfx
import tgfx.distributed
from examples.distributed.ranks import process_group
from examples.distributed.train import Run, Settings, finished, resume, rewrap, start, train
from tests.support.group_threads import assert_no_threads_of_the_group
from tgfx.errors import InputError, TgfxError
from tgfx.training.vectors import gate_weights

SETTINGS = Settings(width=8, steps=30, batch=16, every=10)
DIES_AT = 17


def gathered(tensor: Tensor) -> list[Tensor]:
    places = [torch.empty_like(tensor) for _ in range(distributed.get_world_size())]
    distributed.all_gather(places, tensor.contiguous())
    return places


def assert_equal_on_ranks(run: Run) -> None:
    """Latent weights to the bit, and so gates and ratio."""
    first, *others = gathered(gate_weights(run.gated))
    assert all(torch.equal(first, other) for other in others), f"step {run.step}: gates differ between ranks"
    ratios = gathered(torch.tensor(run.gated.ratio("flops").item(), dtype=torch.float64))
    assert all(torch.equal(ratios[0], other) for other in ratios[1:]), f"step {run.step}: {ratios}"


def outcome(run: Run, seen: list[float]) -> dict[str, object]:
    """What must come out the same; the same on each rank."""
    result = finished(run)
    whole = tgfx.distributed.gather(run.gated) if run.settings.shard else run.gated
    hashes: list[str | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(hashes, tgfx.distributed.fingerprint_of_gates(whole))
    assert len(set(hashes)) == 1, f"the ranks would cut different models: {hashes}"
    flat = torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])
    for other in gathered(flat)[1:]:
        assert torch.equal(other, flat), "the ranks' compact models differ"
    return {
        "gates": hashes[0],
        "ratio": result.ratio("flops"),
        "weights": flat.double().tolist(),
        "moved": result.moved,
        "ratios": seen,
    }


def whole_run(settings: Settings) -> dict[str, object]:
    run, seen = start(settings), []

    def between(run: Run) -> None:
        assert_equal_on_ranks(run)
        seen.append(run.gated.ratio("flops").item())
        if run.step == 12 and not settings.shard:
            rewrap(run, lambda run: None)  # out of DDP and into it again changes nothing

    train(run, between)
    if settings.shard:
        refuses_sharded(run)
    return outcome(run, seen)


def refuses_sharded(run: Run) -> None:
    for cut in (lambda: tgfx.shrink(run.gated), lambda: tgfx.finish(run.gated, flops=0.5)):
        try:
            cut()
        except InputError as error:
            assert "tgfx.distributed.gather" in str(error)
        else:
            raise AssertionError("a sharded model was cut")


def different_batches(settings: Settings) -> None:
    """Ranks with batches of different sizes still come to the same gates."""
    run = start(replace(settings, steps=6))
    run.settings = replace(run.settings, batch=16 if distributed.get_rank() else 5)
    train(run, assert_equal_on_ranks)


def refuses_parts(settings: Settings) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    gated = start(settings).gated
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    fully_shard(gated.get_submodule("stage1"), mesh=mesh)
    try:
        tgfx.BudgetController(gated, {"flops": 0.5})
    except TgfxError as error:
        assert "stage1" in str(error)
    else:
        raise AssertionError("a part that is never gathered was accepted")


def weights_on_ranks(run: Run) -> list[int]:
    """How many weights each rank trains; their values are the same to the bit."""
    flat = torch.cat([p.detach().reshape(-1) for p in run.gated.parameters()])
    counts = [int(count) for count in gathered(torch.tensor(len(flat)))]
    assert len(set(counts)) == 1, f"step {run.step}: the ranks have cut differently: {counts}"
    first, *others = gathered(flat)
    assert all(torch.equal(first, other) for other in others), f"step {run.step}: weights differ between ranks"
    return counts


def compacted_runs(folder: Path) -> dict[str, object]:
    settings = replace(SETTINGS, compact_every=4)
    sizes: list[int] = []

    def between(run: Run) -> None:
        assert_equal_on_ranks(run)
        sizes.append(weights_on_ranks(run)[0])

    whole = start(settings)
    train(whole, between)
    half = start(replace(settings, folder=folder))

    def stops(run: Run) -> None:
        if run.step == 20:
            raise StopIteration

    with suppress(StopIteration):
        train(half, stops)
    resumed = start(replace(settings, folder=folder))
    assert resume(resumed) and resumed.step == 20
    at_resume = weights_on_ranks(resumed)[0]
    train(resumed, assert_equal_on_ranks)
    return {
        "sizes": sizes,
        "at resume": at_resume,
        "whole": outcome(whole, []),
        "resumed": outcome(resumed, []),
    }


def refuses_fit(folder: Path) -> None:
    """On every rank, before anything is written."""
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)), torch.randn(4, 4)
    gated = tgfx.transform(model, x)
    loader = [(x, torch.zeros(4, dtype=torch.long))]
    options = {"budget": {"flops": 0.5}, "checkpoint": folder / "last.pt", "log": folder / "log", "progress": False}
    try:
        tgfx.fit(gated, loader, torch.nn.functional.cross_entropy, **options)
    except TgfxError as error:
        assert "examples/distributed" in str(error) and "found:    2 (torchrun)" in str(error), error
    else:
        raise AssertionError("each of two processes trained on its own")


def dies(run: Run) -> None:
    if run.step == DIES_AT and distributed.get_rank() == 1:
        os._exit(13)


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    if what == "fit":
        refuses_fit(folder)
    with process_group():
        found = asked_for(what, folder)
        if found and distributed.get_rank() == 0:
            (folder / f"{what}.json").write_text(json.dumps(found))
    assert_no_threads_of_the_group()


def asked_for(what: str, folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    if what == "fit":
        refuses_fit(folder)
        return found
    if what == "compacted":
        return compacted_runs(folder)
    if what == "first":
        different_batches(SETTINGS)
        refuses_parts(SETTINGS)
        found["ddp"] = whole_run(SETTINGS)
        found["fsdp"] = whole_run(replace(SETTINGS, shard=True))
    run = start(replace(SETTINGS, folder=folder))
    resumed = resume(run)
    assert resumed == (what == "second"), f"{what}: resumed is {resumed}"
    found["from"] = run.step
    if distributed.get_rank() == 0 and what == "first":
        (folder / "first.json").write_text(json.dumps(found))
    train(run, dies if what == "first" else assert_equal_on_ranks)
    found["ddp"] = outcome(run, [])
    return found


if __name__ == "__main__":
    main()
