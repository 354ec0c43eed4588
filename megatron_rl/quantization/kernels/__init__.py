"""Triton kernels."""


def available() -> bool:
    return False
