"""Operators that each runtime takes, as its own documentation or converter lists them.

A name here says that the operator is known; profile_settings.py says with which settings it is not, and
`tgfx.verify_onnx` tries the real thing.
"""

from __future__ import annotations

SOURCES = {
    "nnapi": "ONNX Runtime 1.31, onnxruntime/tools/mobile_helpers/nnapi_supported_ops.md",
    "coreml": "ONNX Runtime 1.31, onnxruntime/tools/mobile_helpers/coreml_supported_mlprogram_ops.md",
    "ncnn": "pnnx 20261020, ONNX operators that its converter has patterns for, and ncnn's BinaryOp, UnaryOp and Erf",
    "mnn": "MNN 3.6.1, what its converter lists with -f ONNX --OP",
}

_NNAPI = """
Abs Add AveragePool BatchNormalization Cast Clip Concat Conv DepthToSpace DequantizeLinear Div Elu Exp Flatten Floor
Gather Gemm GlobalAveragePool GlobalMaxPool Identity LRN LeakyRelu Log MatMul Max MaxPool Min Mul Neg PRelu Pad Pow
QLinearConv QLinearMatMul QuantizeLinear ReduceMean Relu Reshape Resize Sigmoid Sin Slice Softmax Split Sqrt Squeeze
Sub Tanh Transpose Unsqueeze
"""

_COREML = """
Add And ArgMax AveragePool Cast Ceil Clip Concat Conv ConvTranspose Cos DepthToSpace Div Elu Erf Exp GatherND Gelu
Gemm GlobalAveragePool GlobalMaxPool GridSample GroupNormalization HardSigmoid Identity InstanceNormalization
LayerNormalization LeakyRelu MatMul Max MaxPool Mul PRelu Pow Reciprocal ReduceMax ReduceMean ReduceSum Relu Reshape
Resize Round Shape Sigmoid Sin Slice Softmax Softplus Split Sqrt Squeeze Sub Tanh Tile Transpose Unsqueeze Where
"""

_NCNN = """
Abs Acos Add ArgMax ArgMin Asin Atan AveragePool BatchNormalization Cast Ceil Celu Clip Concat ConstantOfShape Conv
ConvTranspose Cos DepthToSpace Div Elu Erf Exp Expand Flatten Floor GRU Gather Gelu Gemm GlobalAveragePool
GlobalMaxPool GridSample GroupNormalization HardSigmoid HardSwish InstanceNormalization LRN LSTM LayerNormalization
LeakyRelu Log LogSoftmax MatMul Max MaxPool Min Mish Mul Neg PRelu Pad Pow RMSNormalization RNN Range Reciprocal
ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare
Relu Reshape Resize Round Selu Shrink Sigmoid Sign Sin Slice Softmax Softplus SpaceToDepth Split Sqrt Squeeze Sub Sum
Tan Tanh Tile Transpose Unsqueeze Upsample
"""

_MNN = """
Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BatchNormalization BitShift Cast CastLike Ceil
Celu Clip Compress Concat ConcatFromSequence Constant ConstantOfShape Conv ConvTranspose Cos Cosh CumSum DepthToSpace
DequantizeLinear Det Div Dropout DynamicQuantizeLinear Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor GRU
Gather GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool Greater GreaterOrEqual
GridSample HardSigmoid HardSwish Identity If InstanceNormalization LRN LSTM LayerNormalization LeakyRelu Less
LessOrEqual Log LogSoftmax Loop LpNormalization LpPool MatMul Max MaxPool MaxRoiPool MaxUnpool Mean
MeanVarianceNormalization Min Mod Mul Neg NegativeLogLikelihoodLoss NonMaxSuppression NonZero Not OneHot Or PRelu Pad
Pow QuantizeLinear RNN RandomNormal RandomNormalLike RandomUniform RandomUniformLike Range Reciprocal ReduceL1
ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape
Resize ReverseSequence RoiAlign Round STFT Scatter ScatterElements ScatterND Selu SequenceAt SequenceConstruct
SequenceEmpty SequenceErase SequenceInsert SequenceLength Shape Shrink Sigmoid Sign Sin Sinh Size Slice Softmax
SoftmaxCrossEntropyLoss Softplus Softsign SpaceToDepth Split SplitToSequence Sqrt Squeeze Sub Sum Tan Tanh
ThresholdedRelu Tile TopK Transpose Trilu Unique Unsqueeze Upsample Where Xor
"""

OPERATORS = {
    name: frozenset(listed.split())
    for name, listed in (("nnapi", _NNAPI), ("coreml", _COREML), ("ncnn", _NCNN), ("mnn", _MNN))
}
