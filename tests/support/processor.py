"""Keeps bfloat16 off instructions that the processor names and does not run.

Some virtual machines show AMX without letting programs use it: the first convolution or product in bfloat16 then ends
the process. It is tried in a process of its own; where that dies, oneDNN is told to do without.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

LIMIT = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX = "AVX512_CORE_BF16"
TRIAL = (
    "import torch; torch.nn.Conv2d(16, 16, 3).bfloat16()(torch.ones(2, 16, 8, 8, dtype=torch.bfloat16)); "
    "torch.ones(64, 64, dtype=torch.bfloat16) @ torch.ones(64, 64, dtype=torch.bfloat16)"
)


def names_amx(facts: Path = Path("/proc/cpuinfo")) -> bool:
    return facts.is_file() and " amx_bf16" in facts.read_text()


def avoid_broken_amx() -> None:
    """Before the first operation of torch; processes started later inherit it."""
    if LIMIT in os.environ or not names_amx():
        return
    tried = subprocess.run([sys.executable, "-c", TRIAL], capture_output=True)
    if tried.returncode == -signal.SIGILL:
        os.environ[LIMIT] = WITHOUT_AMX
