"""Settings for the whole test run."""

import os
import signal

import torch
from hypothesis import settings

from tests.support import torchvision_ops  # noqa: F401  before any test imports torchvision
from tests.support.processor import avoid_broken_amx

avoid_broken_amx()

# `make test` runs two workers on two cores; more threads would only fight for them.
torch.set_num_threads(1)

settings.register_profile("tgfx", deadline=None)
settings.register_profile("tgfx-ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("tgfx-ci" if os.environ.get("CI") else "tgfx")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background ignores Ctrl-C, which tests send
    signal.signal(signal.SIGINT, signal.default_int_handler)
