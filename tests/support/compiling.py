"""Compile a Triton kernel for Hopper without a GPU, and read what it takes."""

from __future__ import annotations

import inspect
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

SHARED_MEMORY = 227 * 1024
"""Bytes that a program may take on sm_90."""
_REGISTERS = 64 * 1024
_RESERVED = 1024
"""Bytes of shared memory that the system takes of every program."""


@dataclass(frozen=True)
class Compiled:
    """A kernel for sm_90."""

    ptx: str
    shared: int
    """Bytes a program."""
    threads: int
    """Of a program."""
    cubin: bytes

    @property
    def resources(self) -> Resources:
        """As the assembler counted them."""
        import triton

        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(self.cubin)
            said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said)
        registers, stack, local = map(int, found.groups())
        return Resources(registers, stack + local)

    @property
    def programs_at_once(self) -> int:
        """On one processor, by registers and shared memory."""
        registers = -(-self.resources.registers // 8) * 8 * self.threads
        return min(_REGISTERS // registers, (SHARED_MEMORY + _RESERVED) // (self.shared + _RESERVED))


@dataclass(frozen=True)
class Resources:
    """Of one thread."""

    registers: int
    spilled: int
    """Bytes that did not fit in registers."""


def compile_for_hopper(
    kernel, types: dict[str, str], constants: dict[str, object], sixteens: Sequence[str] = (), **options
) -> Compiled:
    """Arguments without a type are int32; pointers are multiples of 16 as torch's, and so are ``sixteens``."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    constants = {p.name: p.default for p in kernel.params if p.has_default} | constants
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (parameter.num,): [["tt.divisibility", 16]]
        for parameter in kernel.params
        if parameter.name in sixteens
        or (signature[parameter.name].startswith("*") and not parameter.do_not_specialize_on_alignment)
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    made = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return Compiled(made.asm["ptx"], made.metadata.shared, 32 * made.metadata.num_warps, made.asm["cubin"])


def kind_of_call(kernel, types: dict[str, str], given: Mapping[str, int | float] = MappingProxyType({})) -> object:
    """What Triton tells calls apart by: one of another kind is compiled anew.

    ``given`` are addresses of pointers, 64 without one, and numbers, 3 without one.
    """
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import MockTensor, create_function_from_signature

    def argument(name: str) -> object:
        if not types.get(name, "").startswith("*"):
            return given.get(name, 3)
        pointer = MockTensor(torch.float32)
        pointer.data_ptr = lambda: given.get(name, 64)
        return pointer

    arguments = {p.name: 16 if p.is_constexpr else argument(p.name) for p in kernel.params}
    backend = make_backend(GPUTarget("cuda", 90, 32))
    return create_function_from_signature(inspect.signature(kernel.fn), kernel.params, backend)(**arguments)[1]


def compiled(kernel, types: dict[str, str], constants: dict[str, object], **options) -> tuple[str, int]:
    """The PTX and the shared memory."""
    made = compile_for_hopper(kernel, types, constants, **options)
    return made.ptx, made.shared
