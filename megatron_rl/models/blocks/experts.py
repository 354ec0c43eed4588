"""The layer of routed experts: megatron's layer, with one stacked parameter for all experts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

from megatron_rl.families import LayerKind
from megatron_rl.models import override
from megatron_rl.models.adapters import expert_of
from megatron_rl.models.blocks import Block
from megatron_rl.models.blocks.dense import GatedMLP
from megatron_rl.models.expert_ops import Dispatched, ExpertOps, LinearInput, activated, ordered_dispatch
from megatron_rl.models.rollout_ops import Pending, WholeColumnLinear, WholeRowLinear, call_linear
from megatron_rl.models.routing import BalancedRouter, Routing
from megatron_rl.platform.megatron import submodules_of
from megatron_rl.quantization.copies import StackedLinear

if TYPE_CHECKING:
    from megatron_rl.models.rollout import RolloutPlan


class ExpertLayer(Block, MoELayer):
    """megatron's MoE layer."""

    expects = {
        "moe_latent_size": None, "moe_apply_probs_on_input": False, "moe_shared_expert_overlap": False,
    }  # fmt: skip
    routing: Routing | None
    """Experts chosen in rollouts and replayed in training; see `replay_routing`."""
    _rollout: RolloutPlan | None = None
    """Set while a rollout runs `forward`, as with Transformer Engine."""

    @staticmethod
    def stock(config: TransformerConfig) -> dict[str, Any]:
        return {"num_experts": config.num_moe_experts}

    @staticmethod
    def replace_modules(submodules: MoESubmodules, config: TransformerConfig) -> None:
        if config.moe_grouped_gemm:
            submodules.experts = GroupedExperts
        elif config.expert_tensor_parallel_size == 1:
            single = submodules_of(submodules.experts)
            single.linear_fc1, single.linear_fc2 = WholeColumnLinear, WholeRowLinear
        if config.moe_shared_expert_intermediate_size is not None and config.tensor_model_parallel_size == 1:
            shared = submodules_of(submodules.shared_experts)
            shared.linear_fc1, shared.linear_fc2 = WholeColumnLinear, WholeRowLinear

    def prepare(self, _: LayerKind) -> None:
        self.router.__class__ = BalancedRouter
        self.router.freeze_bias()
        if self.shared_experts is not None:
            self.shared_experts.__class__ = SharedExperts
        self.routing = None
        for name, parameter in self.experts.named_parameters():
            # megatron marks biases of single experts as replicated over tensor-parallel ranks.
            if name.startswith("local_experts.") and name.endswith("linear_fc2.bias"):
                parameter.sequence_parallel = False
                set_tensor_model_parallel_attributes(parameter, True, 0, 1)

    def replay_routing(self) -> None:
        """From now on record chosen experts in rollouts, and use those of the plan in training."""
        self.routing = self.router.router_replay = Routing()

    @contextlib.contextmanager
    def using_plan(self, plan: Any) -> Iterator[None]:
        """Give the router experts and balance losses of a `PackedPlan`; `decode` in `forward` for a `RolloutPlan`."""
        replayed = getattr(plan, "routing", None)
        with contextlib.ExitStack() as stack:
            stack.enter_context(override("_rollout", {self: plan if hasattr(plan, "ops") else None}))
            stack.enter_context(self.router.using_balance(getattr(plan, "balance", None)))
            if self.routing is not None:
                stack.enter_context(self.routing.replaying(None if replayed is None else replayed[self.layer_number]))
            yield

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run megatron's layer in training: [T, 1, hidden] to the same, without a bias."""
        if self._rollout is None:
            with ordered_dispatch() if self.config.deterministic_mode else contextlib.nullcontext():
                return super().forward(hidden_states, *args, **named)
        return self.decode(hidden_states[:, 0], self._rollout).output[:, None], None

    def decode(self, normed: torch.Tensor, plan: RolloutPlan) -> Pending:
        output = self._run(normed, plan)
        if self.routing is not None:
            plan.record_routing(self.layer_number, self.routing.chosen)
        return Pending(output, None)

    def run_dummy_pass(self, token: torch.Tensor, plan: RolloutPlan) -> None:
        self._run(token, plan)

    def _run(self, tokens: torch.Tensor, plan: RolloutPlan) -> torch.Tensor:
        is_shared = self.config.expert_model_parallel_size > 1
        if not self.config.moe_grouped_gemm or (is_shared and plan.max_tokens_per_ep_rank is None):
            return MoELayer.forward(self, tokens[:, None])[0].view(tokens.shape)
        shares, chosen = plan.ops.experts.route(tokens, self.router)
        if self.routing is not None:
            self.routing.chosen = chosen
        run = self._run_expert_parallel if is_shared else self._run_local
        routed = reduce_from_tensor_model_parallel_region(run(tokens, shares, chosen, plan), self.experts.tensor_group)
        return routed if self.shared_experts is None else routed + self.shared_experts.decode(tokens, plan)

    def _run_local(
        self, tokens: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor, plan: RolloutPlan
    ) -> torch.Tensor:
        """Run this rank's part of the experts like megatron's dispatcher, but without a host read.

        ``chosen`` [T, k] counts this rank's experts from 0, with weights ``shares``; larger numbers are experts
        elsewhere. Sums are in megatron's order: with one tensor-parallel rank bit-identical on a CPU.
        """
        ops, reader = plan.ops.experts, self.experts.linear_fc1
        dispatched = ops.dispatch(tokens, shares, chosen, len(self.local_expert_indices), reader)
        return ops.combine(self.experts.decode(dispatched, ops), dispatched, tokens.shape[0])

    def _run_expert_parallel(
        self, tokens: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor, plan: RolloutPlan
    ) -> torch.Tensor:
        """Run expert-parallel: all-gather the tokens, run this rank's experts, and send the sums back.

        Each rank has at most ``plan.max_tokens_per_ep_rank`` tokens, so all sizes are known without a host read. With
        at least as many experts per token as ranks, all-to-all would hardly send less.
        """
        ranks, mine = self.experts.expert_group, self.local_expert_indices
        rows = plan.max_tokens_per_ep_rank or tokens.shape[0]
        everything = gather_rows(tokens, rows, ranks)
        # One exchange: expert numbers are exact in fp32. They count from 1, as padding is 0.
        pairs = gather_rows(torch.cat((shares, chosen + 1), 1), rows, ranks)
        shares, number = pairs.chunk(2, 1)
        place = number.int() - (mine[0] + 1)
        place = place.where((place >= 0) & (place < len(mine)), len(mine))
        summed = self._run_local(everything, shares, place, plan)
        parts = torch.empty_like(summed)
        dist.all_to_all_single(parts, summed, group=ranks)  # and one rounding, where a reduction rounds each addition
        return parts.view(ranks.size(), rows, -1).sum(0)[: tokens.shape[0]]


class SharedExperts(SharedExpertMLP, GatedMLP):
    """An MLP beside the routed experts, for every token."""

    def decode(self, tokens: torch.Tensor, plan: RolloutPlan) -> torch.Tensor:
        """Run `forward` on rollout tokens, [T, hidden]."""
        if self.config.transformer_impl == "transformer_engine":  # whose products want [T, 1, hidden]
            return self.forward(tokens[:, None])[:, 0]
        inner, _ = call_linear(self.linear_fc1, tokens)
        output, _ = call_linear(self.linear_fc2, plan.ops.activate(inner, self.config, self.linear_fc2))
        return output * functional.linear(tokens, self.gate_weight).sigmoid() if self.use_shared_expert_gate else output


def gather_rows(values: torch.Tensor, rows: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather [T, width] of each rank, zero-padded to ``rows`` -> [ranks x rows, width]."""
    padded = functional.pad(values, (0, 0, 0, rows - values.shape[0]))
    gathered = values.new_empty(group.size() * rows, values.shape[1])
    dist.all_gather_into_tensor(gathered, padded, group=group)
    return gathered


class GroupedExperts(MegatronModule):
    """A layer's experts as two stacked weights and two grouped products, instead of `SequentialMLP`.

    Bit-identical on a CPU, forward and backward. Checkpoints and names list single experts: see `parts`.
    """

    linear: type[StackedLinear] = StackedLinear

    def __init__(self, num_local_experts: int, config: TransformerConfig, pg_collection: Any, **_: Any) -> None:
        """``_``: newer versions of megatron also pass the layer's name."""
        super().__init__(config=config)
        self._count = num_local_experts
        self.expert_group, self.tensor_group = pg_collection.ep, pg_collection.expt_tp
        self._replica_group = pg_collection.expt_dp
        width = config.moe_ffn_hidden_size // self.tensor_group.size()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self._halves = 2 if config.gated_linear_unit else 1

        def parameter(*shape: int, cut: int, blocks: int) -> torch.nn.Parameter:
            values = torch.empty(num_local_experts, *shape, dtype=config.params_dtype, device=device)
            made = torch.nn.Parameter(values)
            set_tensor_model_parallel_attributes(made, True, cut, blocks)
            made.allreduce = config.expert_model_parallel_size == 1  # megatron's mark of what replicas hold alike
            return made

        def stacked(rows: int, columns: int, cut: int) -> StackedLinear:
            blocks = self._halves if cut == 1 else 1
            weight = parameter(rows, columns, cut=cut, blocks=blocks)
            bias = parameter(rows, cut=1, blocks=blocks) if config.add_bias_linear else None
            return self.linear(weight, self.tensor_group, "columns" if cut == 1 else "rows", bias)

        self.linear_fc1 = stacked(self._halves * width, config.hidden_size, cut=1)
        """[experts, gate and up, hidden]."""
        self.linear_fc2 = stacked(config.hidden_size, width, cut=2)
        """[experts, hidden, width]."""
        self.register_state_dict_post_hook(self._split_state_dict)

    def forward(
        self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, probabilities: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Map ``tokens`` [N, hidden] sorted by expert to [N, hidden], each times its fp32 probability."""
        ends = tokens_per_expert.cumsum(0).to(tokens.device, torch.int32)
        inner = activated(self._first_product(tokens, ends), probabilities, self.config)
        return self._second_product(inner, probabilities, ends), None

    def decode(self, dispatched: Dispatched, ops: ExpertOps) -> torch.Tensor:
        """Run `forward` on dispatched rollout tokens: [N, hidden]."""
        inner = self._first_product(dispatched.rows, dispatched.ends)
        opened = ops.activate(inner, dispatched.shares, self.config, self.linear_fc2)
        return self._second_product(opened, dispatched.shares, dispatched.ends)

    def _first_product(self, tokens: LinearInput, ends: torch.Tensor) -> torch.Tensor:
        product = self.linear_fc1(tokens, ends)
        if self.linear_fc1.bias is None:
            return product
        return product + self.linear_fc1.biases_of(len(product), ends)

    def _second_product(self, opened: LinearInput, shares: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Compute the second product of ``opened``, which includes the ``shares`` [N]; the bias does not yet."""
        product = self.linear_fc2(opened, ends)
        if self.linear_fc2.bias is None:
            return product
        return (product + self.linear_fc2.biases_of(len(product), ends) * shares[:, None]).to(product.dtype)

    def parts(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield views of the single experts, named as in `SequentialMLP`; adapters are separate."""
        own = [(name, stack) for name, stack in self.named_parameters() if ".adapter." not in name]
        for expert in range(self._count):
            for name, stack in own:
                yield f"local_experts.{expert}.{name}", expert_of(stack, expert)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describe the tensors for ``dist_checkpointing``; files equal those of `SequentialMLP`."""
        first, whole = self.expert_group.rank() * self._count, self.expert_group.size() * self._count
        rank, ranks = self.tensor_group.rank(), self.tensor_group.size()
        axis = len(sharded_offsets)  # of experts; rows and columns come after it

        def split(halves: int, cut: int) -> Any:
            def build(key: str, stack: torch.Tensor, replica: Any, _: Any = None) -> list[list[ShardedTensor]]:
                return [
                    [
                        ShardedTensor.from_rank_offsets(
                            key, piece, *sharded_offsets, (axis, first + expert, whole),
                            (axis + cut, rank + half * ranks, halves * ranks),
                            replica_id=replica, prepend_axis_num=axis + 1,
                        )
                        for half, piece in enumerate(values.chunk(halves))
                    ]
                    for expert, values in enumerate(stack)
                ]  # fmt: skip

            return build

        state: dict[str, Any] = {}
        replica = (0, 0, self._replica_group.rank())
        for name, halves in (("linear_fc1", self._halves), ("linear_fc2", 1)):
            key = f"{prefix}experts.{name}"
            for kind, stack in getattr(self, name).named_parameters():
                state[f"{prefix}{name}.{kind}"] = ShardedTensorFactory(
                    f"{key}.{kind}", stack, split(halves, stack.partition_dim), _stacked, replica_id=replica
                )
            for expert in range(self._count):  # without content; a loop over the experts asks for it
                place = (*sharded_offsets, (axis, first + expert, whole))
                state[f"{prefix}local_experts.{expert}.{name}._extra_state"] = make_sharded_object_for_checkpoint(
                    None, f"{key}._extra_state", place, replica_id=(0, rank, replica[2])
                )
        return state

    @staticmethod
    def _split_state_dict(experts: GroupedExperts, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Replace the stacks in a ``state_dict`` by single experts, as in `SequentialMLP`."""
        for name, _ in experts.named_parameters():
            del state[f"{prefix}{name}"]
        state.update({prefix + name: part.detach() for name, part in experts.parts()})

    @torch.no_grad()
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load single experts, or the stacks that ``dist_checkpointing`` has filled."""
        for name, part in self.parts():
            single = state_dict.pop(prefix + name, None)
            if single is not None:
                part.copy_(single)
                stack = name.rpartition("local_experts.")[2].partition(".")[2]
                state_dict[prefix + stack] = self.get_parameter(stack)
        for key in [key for key in state_dict if key.startswith(f"{prefix}local_experts.")]:  # without content
            del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *args)


@torch.no_grad()
def _stacked(experts: list[list[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([torch.cat(pieces) for pieces in experts])


BLOCK = ExpertLayer
