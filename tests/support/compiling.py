"""Compile a Triton kernel for Hopper without a GPU."""

from __future__ import annotations

SHARED_MEMORY = 227 * 1024
"""Bytes that a program may take on sm_90."""


def compiled(kernel, types: dict[str, str], constants: dict[str, object], **options) -> tuple[str, int]:
    """The PTX and the shared memory; arguments without a type are int32, pointers are multiples of 16 as torch's."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    made = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return made.asm["ptx"], made.metadata.shared
