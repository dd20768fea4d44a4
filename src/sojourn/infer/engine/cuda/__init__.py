"""The engine on CUDA: Triton kernels, and CUDA graphs of decoding steps."""
