"""Triton kernels of quantised rollouts on CUDA; import them only there, or in Triton's interpreter, as tests do.

The definition of every number is `megatron_rl.quantization.formats`; the kernels give the same scales to the
bit and the same codes (but for the sign of a zero).
"""
