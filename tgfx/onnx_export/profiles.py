"""What a runtime on a phone wants of a file: fixed shapes, its own operators, its own format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tgfx.errors import ExportError, InputError, VerificationError
from tgfx.onnx_export.channel_chains import drop_unused
from tgfx.onnx_export.graph_size import all_nodes
from tgfx.onnx_export.lowering import lowered
from tgfx.onnx_export.node_facts import NodeFacts
from tgfx.onnx_export.parity import delta, tolerance_for
from tgfx.onnx_export.profile_ops import OPERATORS, SOURCES
from tgfx.onnx_export.profile_settings import complaints
from tgfx.onnx_export.proving import Case
from tgfx.onnx_export.quietly import quietly
from tgfx.onnx_export.session import open_session, run
from tgfx.optional_packages import needed

FREE = {"Constant", "Identity"}  # become weights, or nothing
SHOWN = 12


@dataclass(frozen=True)
class Profile:
    """static: the runtime (or its converter) takes or is fast with fixed shapes only; ort: write an .ort file too."""

    name: str | None
    static: bool = False
    ort: bool = False
    single: bool = False  # no batch dimension

    def notes(self, dynamic_batch: bool, dynamic_size: bool) -> list[str]:
        if self.static and (dynamic_batch or dynamic_size):
            return [f"all shapes are the example's: {self.name} wants fixed ones"]
        return []


PROFILES = {
    "nnapi": Profile("nnapi", static=True),
    "coreml": Profile("coreml", static=True),
    "ncnn": Profile("ncnn", static=True, single=True),
    "mnn": Profile("mnn"),
    "ort-mobile": Profile("ort-mobile", ort=True),
}


def profile_named(name: str | None) -> Profile:
    if name is None:
        return Profile(None)
    if name not in PROFILES:
        raise InputError("unknown profile", expected=", ".join(PROFILES), found=repr(name))
    return PROFILES[name]


def check_batch(profile: Profile, batch: int) -> None:
    if profile.single and batch != 1:
        raise InputError(
            f"{profile.name} has no batch dimension",
            expected="an example of one sample",
            found=f"a batch of {batch}",
            fix="pass example_inputs of batch 1",
        )


def fitted(model: Any, profile: Profile) -> tuple[Any, list[str]]:
    """The model with less of what the runtime lacks, where ONNX says how, and what was changed."""
    if profile.name is None or profile.name not in OPERATORS:
        return model, []
    name = profile.name
    model, changes = lowered(model, OPERATORS[name] | FREE, lambda node, facts: bool(complaints(name, node, facts)))
    if changes:
        drop_unused(model)
    return model, changes


def check_operators(model: Any, profile: Profile, sources: dict[str, str]) -> None:
    """Every node must be one that the runtime takes; those that are not are listed with the user's lines."""
    if profile.name is None or profile.name not in OPERATORS:
        return
    known = OPERATORS[profile.name] | FREE
    facts = NodeFacts(model)
    lines, missing = [], False
    for node in all_nodes(model.graph):
        if node.op_type in FREE:
            continue
        unknown = bool(node.op_type not in known or node.domain)
        reasons = [] if unknown else complaints(profile.name, node, facts)
        if unknown or reasons:
            place = next((sources[output] for output in node.output if output in sources), "")
            told = f"{node.op_type} '{node.name}'" + (f" ({place})" if place else "")
            lines.append(told + (f": {reasons[0]}" if reasons else ""))
            missing |= unknown
    if not lines:
        return
    what = "lacks operators that the model uses" if missing else "does not take nodes of the model as they are set"
    raise ExportError(
        f"{profile.name} {what}",
        expected=f"operators in {SOURCES[profile.name]}",
        found="\n".join([*lines[:SHOWN], *([f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else [])]),
        fix="change these layers, or export without the profile: other runtimes may take them",
    )


def provider_note(model: Any, profile: Profile) -> list[str]:
    """How ONNX Runtime's own tool expects the nodes to be divided between the accelerator and the CPU."""
    if profile.name not in ("nnapi", "coreml"):
        return []
    onnx = needed("onnx")
    checker = needed("onnxruntime.tools.mobile_helpers.usability_checker", purpose=f"the profile {profile.name}")
    shaped = onnx.shape_inference.infer_shapes(model, data_prop=True)
    if profile.name == "nnapi":
        found = checker.check_nnapi_partitions(shaped, True)
    else:
        found = checker.check_coreml_partitions(shaped, True, "coreml_supported_mlprogram_ops.md")
    taken, parts = found.num_supported_nodes, found.num_partitions
    return [f"ONNX Runtime's usability checker: {taken} of {found.num_nodes} nodes in {parts} part(s)"]


def write_ort(aside: Path, cases: list[Case]) -> None:
    """The same model as an .ort file next to it, run against torch as well."""
    converted = aside.with_suffix(".ort")
    _convert(aside)
    session = open_session(converted)
    for case in cases:
        found = run(session, case.feeds)
        for output, expected in case.expected.items():
            gap = delta(expected, found[output])
            if not gap.within(tolerance_for(expected)):
                raise VerificationError(
                    "the .ort file does not compute what torch does; nothing is handed out",
                    expected=f"{output} at {case.name}",
                    found=f"max |difference| {gap.largest:.3g}",
                )


def _convert(onnx_file: Path) -> None:
    """By onnxruntime's own tool; the list of operators for a reduced build that it also writes names this folder."""
    tools = needed("onnxruntime.tools.convert_onnx_models_to_ort", purpose="writing .ort files")
    with quietly():
        styles = [tools.OptimizationStyle.Fixed]
        tools.convert_onnx_models_to_ort(onnx_file, onnx_file.parent, styles, target_platform="arm")
    onnx_file.with_suffix(".required_operators.config").unlink(missing_ok=True)
