"""The ONNX format: a graph with KV cache for onnxruntime and onnxruntime-genai."""
