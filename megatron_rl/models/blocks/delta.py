"""A gated delta rule (DeltaNet) with the convolution before it: a state of one size in place of keys and values.

megatron's own module needs a package of CUDA kernels, has no rollouts and, in its older versions, no packed batches.
This one has its names. What lies between the projections is fp32, in training and in rollouts alike.
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
    """Of a value head's output; its weight is stored as it is, whatever the other norms' are."""

    def __init__(self, config: TransformerConfig, width: int) -> None:
        super().__init__(config, width, config.layernorm_epsilon)
        self.centre = 0.0
        self.weight.data.fill_(1.0)
        self.weight.sequence_parallel = False  # else megatron would add them up a second time


class DeltaNet(MegatronModule):
    """What `RolloutLayer` is built with; then it becomes a `DeltaMixer`."""

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
        # The spread of the decays that models begin with, of all ranks together.
        decays = torch.linspace(1.0, 16.0, all_heads[1], device=device).log().to(config.params_dtype)
        self.A_log = torch.nn.Parameter(decays.chunk(self._ranks.size())[self._ranks.rank()].clone())
        self.dt_bias = torch.nn.Parameter(torch.ones(self.heads[1], **made))
        channels *= self.heads[0]
        kernel = config.linear_conv_kernel_dim
        # Not "conv1d": in checkpoints of 2026-11-26 that tensor has its rows in another order, and must not be read.
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
        """Compute ``hidden_states`` [T, 1, hidden] of a `PackedPlan`, under sequence parallelism this rank's tokens."""
        plan = packed_seq_params
        if plan.recurrent is None:
            plan.recurrent = Chunks.of(plan.lengths, self.short_conv.kernel_size[0] - 1, hidden_states.device)
        mixed = call_linear(self.in_proj, hidden_states)[0][:, 0]
        # Of a token it would keep some twenty times what the projection gives, so it is computed again, always.
        given = mixed, plan.recurrent
        if torch.is_grad_enabled():
            output = checkpoint(self._through, *given, use_reentrant=False, preserve_rng_state=False)
        else:
            output = self._through(*given)
        return self.out_proj(output[:, None])

    def _through(self, mixed: torch.Tensor, chunks: Chunks) -> torch.Tensor:
        """What `in_proj` gives, [T, ..] -> what `out_proj` takes."""
        inputs, gate, strength, decay = self._split(mixed)
        turned, _ = convolved(inputs, self.short_conv.weight, chunks)
        output, _ = delta_rule(self._inputs(turned, strength, decay), chunks)
        return self._gated(output, gate)

    def _split(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Inputs of the convolution, the output's gate, and in fp32 strength and decay, [T, ..], key head by head."""
        by_head = mixed.unflatten(-1, (self.heads[0], -1)).split(self._parts, -1)
        inputs, gate, strength, decay = (part.flatten(-2) for part in by_head)
        step = functional.softplus(decay.float() + self.dt_bias.float())
        return inputs, gate, strength.float().sigmoid(), -self.A_log.float().exp() * step

    def _inputs(self, turned: torch.Tensor, strength: torch.Tensor, decay: torch.Tensor) -> DeltaInputs:
        return delta_inputs(turned, self.widths, self.heads, strength, decay)

    def _gated(self, output: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Norm of each head, times SiLU of the gate: [T, heads, width] fp32 -> [T, heads * width] as ``gate``."""
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
    """The delta rule, whose rollouts have a state for each row of the batch."""

    module = DeltaNet
    reader = "in_proj"

    def prepare(self, _: LayerKind) -> None:
        """Do nothing: it is what it was built as."""

    def decode(self, normed: LinearInput, plan: RolloutPlan) -> Pending:
        mixed, _ = call_linear(self.in_proj, normed)
        inputs, gate, strength, decay = self._split(mixed)
        states, weight = plan.states(self.layer_number), self.short_conv.weight
        if states.chunks is None:
            turned = convolved_step(inputs, weight, states.past, states.alive)
            output = delta_step(self._inputs(turned, strength, decay), states.memory, states.alive)
        else:
            turned, past = convolved(inputs, weight, states.chunks, states.past)
            output, memory = delta_rule(self._inputs(turned, strength, decay), states.chunks, states.memory)
            states.keep(past, memory)
        return Pending(*call_linear(self.out_proj, self._gated(output, gate)))


BLOCK = DeltaMixer
