"""ExecuTorch, from a program that the parent made of the module itself. Stands alone: see worker.py."""

from importlib.metadata import version

import torch
from executorch.runtime import Runtime

VERSION = version("executorch")


def load(folder, request):
    torch.set_num_threads(request["threads"])
    program = Runtime.get().load_program(folder / "model.pte")
    method = program.load_method("forward")

    def call(feeds):
        found = method.execute([torch.from_numpy(feeds[name]) for name in request["inputs"]])
        return {name: value.numpy() for name, value in zip(request["outputs"], found, strict=True)}

    call.keeps = program  # the method does not hold its program
    return call
