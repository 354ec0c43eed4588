"""Triton kernels over the paged KV cache, on CUDA or in Triton's interpreter; importing this package imports no Triton.

`paged_decode`: one token a row, the keys cut into splits. `paged_extend`: several tokens a sequence. Their twin in
plain torch is ``backends/paged.py``.
"""
