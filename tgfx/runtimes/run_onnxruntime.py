"""ONNX Runtime. Stands alone: see worker.py."""

import onnxruntime

VERSION = onnxruntime.__version__


def load(folder, request):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = request["threads"]
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        str(folder / request["model"]), options, providers=["CPUExecutionProvider"]
    )
    names = [value.name for value in session.get_outputs()]
    wanted = {value.name for value in session.get_inputs()}

    def call(feeds):
        given = {name: value for name, value in feeds.items() if name in wanted}
        return dict(zip(names, session.run(names, given), strict=True))

    return call
