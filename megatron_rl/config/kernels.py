"""Which implementations compute the model, and what is recomputed instead of stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rl.config.fields import flag

_NOT_FUSED = "layers run without fused kernels in this version"


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Implementations, fusions and activation recomputation."""

    transformer_impl: Literal["local", "transformer_engine"] = flag("local")
    """Where layers come from (Megatron's default: transformer_engine, whose rollouts here have no quantised copies)."""
    attention_backend: Literal[
        "auto", "sdpa", "flash", "varlen", "triton_paged", "te", "paged", "fused", "unfused", "local"
    ] = flag("auto")
    """Attention kernel; auto takes the fastest present. Megatron's fused, unfused and local are refused."""
    use_flash_attn: bool = flag(
        False, note="the attention kernel is chosen with --attention-backend, which takes flash where present"
    )
    """Megatron's older spelling of --attention-backend flash."""
    attention_softmax_in_fp32: bool = flag(False, note="every attention kernel here adds up its softmax in fp32")
    """Compute the attention softmax in fp32."""
    masked_softmax_fusion: bool = flag(True, off="--no-masked-softmax-fusion", note=_NOT_FUSED)
    """Fusion of scale, mask and softmax."""
    bias_gelu_fusion: bool = flag(True, off="--no-bias-gelu-fusion", note=_NOT_FUSED)
    """Fusion of bias and GELU."""
    bias_swiglu_fusion: bool = flag(True, off="--no-bias-swiglu-fusion", note=_NOT_FUSED)
    """Fusion of bias and SwiGLU."""
    bias_dropout_fusion: bool = flag(True, off="--no-bias-dropout-fusion", note=_NOT_FUSED)
    """Fusion of bias, dropout and residual."""
    apply_rope_fusion: bool = flag(True, off="--no-rope-fusion", note=_NOT_FUSED)
    """Fusion of the rotary embedding."""
    gradient_accumulation_fusion: bool = flag(
        True, off="--no-gradient-accumulation-fusion", note=_NOT_FUSED
    )
    """Fusion of gradient accumulation into the weight-gradient product."""
    rl_fused_output_layer: bool = flag(False)
    """Train without the logits of a micro-batch in memory, at the cost of one more product of the output layer."""
    enable_cuda_graph: bool = flag(False)
    """Capture the rollout engine's decode step in CUDA graphs; on a CPU, and with experts, it runs eager."""
    cuda_graph_impl: Literal["none", "local", "transformer_engine"] = flag("none")
    """Megatron's newer spelling: local is --enable-cuda-graph. Graphs of Transformer Engine's layers are not built."""
    te_rng_tracker: bool = flag(
        False, note="only CUDA graphs of Transformer Engine's layers need it, and there are none in this version"
    )
    """Use Transformer Engine's random-state tracker, which CUDA graphs of its layers need."""
    use_cpu_initialization: bool = flag(False)
    """Draw weights on the CPU: the same numbers at any tensor-parallel size that pads the vocabulary alike.

    Padding goes to a multiple of --make-vocab-size-divisible-by times the size: 128 on one rank and 64 on two agree.
    """
    recompute_granularity: Literal["full", "selective"] | None = flag(None)
    """Recompute whole layers (full) or --recompute-modules (selective) in the backward pass."""
    recompute_activations: bool = flag(False)
    """Short for --recompute-granularity selective."""
    recompute_method: Literal["uniform", "block"] | None = flag(None)
    """With full: groups of --recompute-num-layers layers (uniform), or only the first ones (block)."""
    recompute_num_layers: int | None = flag(None, ge=1)
    """With full: layers a group (uniform) or layers recomputed (block)."""
    recompute_modules: tuple[Literal["core_attn", "mlp"], ...] | None = flag(None)
    """With selective: what is recomputed. Without it core_attn."""
