"""Out of torch: ONNX files that are small, simplified and proven, and their fp16 and int8 variants."""
