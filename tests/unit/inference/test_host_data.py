"""A decode step makes no tensor of host data and computes nothing on the host: a CUDA graph could not repeat it.

On a CPU a tensor of the host looks like any other, so the step runs on the meta device, where nothing has values:
whatever is not on it is the host's, and whatever is read from it is an error. Tensors made of Python numbers right
on the device are invisible there; the tape, which records on a CPU, refuses them (test_graphs.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_rl.inference.sampler import SamplingModes
from tests.support.meta import META, meta_runner
from tests.support.tape import TapeRecorder
from tests.support.tiny import tiny_config, tiny_policy


class _HostTensors(TorchDispatchMode):
    """Writes down the operators that take or give a tensor on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        leaves = tree_leaves((args, kwargs, result))
        if any(isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" for leaf in leaves):
            self.seen.append(function.overloadpacket.__name__)
        return result


MODELS = {
    "grouped": {},
    "bf16": {"bf16": True},
    "norms": {"normalization": "LayerNorm", "qk_layernorm": True, "add_qkv_bias": False, "swiglu": False},
    "tied": {"untie_embeddings_and_output_weights": False, "disable_bias_linear": False},
}


ALL = [SamplingModes(*given) for given in itertools.product((False, True), repeat=len(SamplingModes()))]
EACH = [modes for modes in ALL if sum(modes) in (0, 1, len(modes))]
"""The sampler does not know the model: its modes are combined with one."""


@pytest.mark.each_value
@pytest.mark.parametrize("backend", ["sdpa", "paged"])
@pytest.mark.parametrize("model", MODELS)
@torch.inference_mode()
def test_no_host_tensor_in_a_decode_step(one_rank: object, model: str, backend: str) -> None:
    decode = meta_runner(tiny_policy(tiny_config(**MODELS[model])), backend).decode
    for modes in EACH if (model, backend) != ("grouped", "sdpa") else ALL:
        list(decode(6, 48, 1, modes))  # what is made once and kept is made here
        with _HostTensors() as host:
            list(decode(6, 48, 1, modes))
        assert host.seen == [], modes


@torch.inference_mode()
def test_experts_in_a_loop_do_read_and_so_have_no_graphs(one_rank: object) -> None:
    policy = tiny_policy(tiny_config(num_experts=4, moe_router_topk=2, add_qkv_bias=False, no_moe_grouped_gemm=True))
    with pytest.raises((NotImplementedError, RuntimeError), match="(?i)meta"):
        list(meta_runner(policy, "sdpa").decode(6, 48, 1, SamplingModes()))


DEVICE = torch.zeros(3, device=META)
HOST_TENSORS: dict[str, Callable[[], object]] = {
    "number": lambda: DEVICE * torch.tensor(2.0),
    "copy": lambda: torch.ones(3).to(META),
    "factory": lambda: torch.arange(3),
}


@pytest.mark.parametrize("kind", HOST_TENSORS)
def test_the_recorder_sees_host_tensors(kind: str) -> None:
    with _HostTensors() as host:
        HOST_TENSORS[kind]()
    assert host.seen


VALUES = torch.zeros(3)
HOST_DATA: dict[str, Callable[[], object]] = {
    "list": lambda: torch.tensor([1.0, 2.0, 3.0]),
    "as_tensor": lambda: torch.as_tensor([1, 2]),
    "number": lambda: VALUES * torch.tensor(2.0),
    "indices": lambda: VALUES[[0, 2]],
    "values by mask": lambda: VALUES.__setitem__(VALUES > 0, VALUES[:1]),
}


@pytest.mark.parametrize("kind", HOST_DATA)
@torch.inference_mode()
def test_the_tape_refuses_host_data(kind: str) -> None:
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        TapeRecorder().record(HOST_DATA[kind])


@torch.inference_mode()
def test_the_tape_fills_by_mask() -> None:
    """What megatron's embedding does over tensor-parallel ranks; on CUDA it is torch's ``masked_fill_``."""
    values = torch.tensor([1.0, -1.0, 2.0])

    def no_negatives() -> None:
        values[values < 0] = 0

    replay = TapeRecorder().record(no_negatives)
    values.copy_(torch.tensor([-3.0, 4.0, -5.0]))
    replay()
    assert values.tolist() == [0.0, 4.0, 0.0]


@pytest.mark.parametrize(
    "read", [lambda: DEVICE[0].item(), lambda: bool(DEVICE[0]), lambda: DEVICE.tolist(), lambda: DEVICE[DEVICE > 0]]
)
def test_a_read_of_the_device_is_an_error(read: Callable[[], object]) -> None:
    with pytest.raises((NotImplementedError, RuntimeError)):
        read()


def test_the_recorder_is_silent_about_device_work() -> None:
    with _HostTensors() as host:
        torch.where(torch.arange(3, device=META) < 2, DEVICE * 2.0, 1.0)[:2].fill_(3)
    assert host.seen == []
