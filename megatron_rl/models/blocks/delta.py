"""Gated DeltaNet: a gated delta rule after a short convolution, with a fixed-size state instead of keys and values.

megatron's module needs a package of CUDA kernels, does not support rollouts and, in older versions, packed batches.
This one has the same names. Between the projections everything is fp32, in training and rollouts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as functional
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils.checkpoint import checkpoint

from megatron_rl.families import LayerKind
from megatron_rl.models.blocks import Block, cut_by_heads
from megatron_rl.models.delta_rule import (
    Chunks,
    DeltaInputs,
    convolved,
    convolved_step,
    delta_inputs,
    delta_rule,
    delta_step,
)
from megatron_rl.models.rollout_ops import (
    LinearInput,
    Pending,
    TorchNorm,
    WholeColumnLinear,
    WholeRowLinear,
    call_linear,
)

if TYPE_CHECKING:
    from megatron_rl.models.rollout import RolloutPlan


class _OutNorm(TorchNorm):
    """Norm of each value head's output; its weight is stored as is, unlike zero-centred norms."""

    def __init__(self, config: TransformerConfig, width: int) -> None:
        super().__init__(config, width, config.layernorm_epsilon)
        self.centre = 0.0
        self.weight.data.fill_(1.0)
        self.weight.sequence_parallel = False  # else megatron would add them up a second time


class DeltaNet(MegatronModule):
    """Built from the layer specification; its class then becomes `DeltaMixer`."""

    def __init__(self, config: TransformerConfig, layer_number: int, pg_collection: Any, **_: Any) -> None:
        super().__init__(config=config)
        self.layer_number, self.pg_collection = layer_number, pg_collection
        self._ranks = pg_collection.tp
        all_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.heads = tuple(count // self._ranks.size() for count in all_heads)
        self.widths = config.linear_key_head_dim, config.linear_value_head_dim
        share = all_heads[1] // all_heads[0]
        value = share * self.widths[1]
        channels = 2 * self.widths[0] + value
        self._parts = channels, value, share, share
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        made = {"dtype": config.params_dtype, "device": device}
        # Initial decays: evenly spread over the heads of all ranks.
        decays = torch.linspace(1.0, 16.0, all_heads[1], device=device).log().to(config.params_dtype)
        self.A_log = torch.nn.Parameter(decays.chunk(self._ranks.size())[self._ranks.rank()].clone())
        self.dt_bias = torch.nn.Parameter(torch.ones(self.heads[1], **made))
        channels *= self.heads[0]
        kernel = config.linear_conv_kernel_dim
        # Not "conv1d": checkpoints of 2026-11-26 have a tensor of that name with rows in another order.
        self.short_conv = torch.nn.Conv1d(channels, channels, kernel, groups=channels, bias=False, **made)
        for parameter in (self.A_log, self.dt_bias, self.short_conv.weight):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        linear = {"config": config, "init_method": config.init_method, "bias": False, "is_expert": False}
        linear["tp_group"] = self._ranks
        is_whole = self._ranks.size() == 1
        self.in_proj = (WholeColumnLinear if is_whole else ColumnParallelLinear)(
            config.hidden_size, all_heads[0] * sum(self._parts), gather_output=False, skip_bias_add=False, **linear
        )
        self.out_norm = _OutNorm(config, self.widths[1])
        linear["init_method"] = config.output_layer_init_method
        self.out_proj = (WholeRowLinear if is_whole else RowParallelLinear)(
            all_heads[0] * value, config.hidden_size, input_is_parallel=True, skip_bias_add=True, **linear
        )

    def forward(
        self, hidden_states: torch.Tensor, *_: Any, packed_seq_params: Any = None, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute ``hidden_states`` [T, 1, hidden] of a `PackedPlan`; T / tensor ranks under sequence parallelism."""
        plan = packed_seq_params
        if plan.recurrent is None:
            plan.recurrent = Chunks.of(plan.lengths, self.short_conv.kernel_size[0] - 1, hidden_states.device)
        mixed = call_linear(self.in_proj, hidden_states)[0][:, 0]
        # Always recomputed: intermediate tensors are about twenty times the projection's output.
        given = mixed, plan.recurrent
        if torch.is_grad_enabled():
            output = checkpoint(self._mix_tokens, *given, use_reentrant=False, preserve_rng_state=False)
        else:
            output = self._mix_tokens(*given)
        return self.out_proj(output[:, None])

    def _mix_tokens(self, mixed: torch.Tensor, chunks: Chunks) -> torch.Tensor:
        """Map the output of `in_proj`, [T, ..], to the input of `out_proj`."""
        inputs, gate, strength, decay = self._split(mixed)
        conv_output, _ = convolved(inputs, self.short_conv.weight, chunks)
        output, _ = delta_rule(self._inputs(conv_output, strength, decay), chunks)
        return self._gated(output, gate)

    def _split(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split into convolution inputs, output gate, and in fp32 strength and decay; [T, ..] each, by key head."""
        by_head = mixed.unflatten(-1, (self.heads[0], -1)).split(self._parts, -1)
        inputs, gate, strength, decay = (part.flatten(-2) for part in by_head)
        step = functional.softplus(decay.float() + self.dt_bias.float())
        return inputs, gate, strength.float().sigmoid(), -self.A_log.float().exp() * step

    def _inputs(self, conv_output: torch.Tensor, strength: torch.Tensor, decay: torch.Tensor) -> DeltaInputs:
        return delta_inputs(conv_output, self.widths, self.heads, strength, decay)

    def _gated(self, output: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Apply each head's norm, times SiLU of the gate: [T, heads, width] fp32 -> [T, heads * width] as ``gate``."""
        weight = self.out_norm.weight.float()
        if self._ranks.size() > 1:  # which all read it, for their own heads, so its gradients are added up
            weight = copy_to_tensor_model_parallel_region(weight, group=self._ranks)
        normed = functional.rms_norm(output, (output.shape[-1],), weight, self.out_norm.eps).flatten(1)
        return (normed * functional.silu(gate.float())).to(gate.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describe the tensors for ``dist_checkpointing``: tensor-parallel ranks have a share of the heads each."""
        described = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        names = "A_log", "dt_bias", "short_conv.weight"
        own = {name: values for name, values in self.state_dict(keep_vars=True).items() if name in names}
        return described | cut_by_heads(own, prefix, sharded_offsets)


class DeltaMixer(Block, DeltaNet):
    """The delta rule; in rollouts every row of the batch has a state."""

    module = DeltaNet
    reader = "in_proj"

    def prepare(self, _: LayerKind) -> None:
        """Do nothing: it was built as a `DeltaNet`."""

    def decode(self, normed: LinearInput, plan: RolloutPlan) -> Pending:
        mixed, _ = call_linear(self.in_proj, normed)
        inputs, gate, strength, decay = self._split(mixed)
        states, weight = plan.states(self.layer_number), self.short_conv.weight
        if states.chunks is None:
            conv_output = convolved_step(inputs, weight, states.past, states.alive)
            output = delta_step(self._inputs(conv_output, strength, decay), states.memory, states.alive)
        else:
            conv_output, past = convolved(inputs, weight, states.chunks, states.past)
            output, memory = delta_rule(self._inputs(conv_output, strength, decay), states.chunks, states.memory)
            states.keep(past, memory)
        return Pending(*call_linear(self.out_proj, self._gated(output, gate)))


BLOCK = DeltaMixer
