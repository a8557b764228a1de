"""FlowNetS in quick mode."""

from __future__ import annotations

from examples.flownet import run as flownet


def test_flownet_quick() -> None:
    results = flownet.main(["--quick", "--quiet"])
    base, whole = results["base"], results["whole"]
    assert base["epe"]["held_out"] < 0.5 * base["before"]["held_out"]
    for budget in (0.6, 0.45):
        cut = results[f"channels-{budget:.2f}"]
        assert 0.99 * budget <= cut["channels"] <= budget
        assert cut["steps"] == whole["steps"]
        assert cut["gated_compact_delta"] < 1e-5 and cut["onnx_delta"] < 1e-4
        assert cut["params_count"] < budget * whole["params_count"]
        assert cut["safetensors_bytes"] < budget * whole["safetensors_bytes"]
        assert cut["epe"]["held_out"] < 1.1 * whole["epe"]["held_out"]
        assert sum(kept for kept, _ in cut["retained"].values()) + 10 == round(cut["channels"] * 738)
