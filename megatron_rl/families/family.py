"""The contents of a family's file, and the detection of a model's family: ``known/qwen2.py`` reads model_type qwen2."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.errors import CheckpointError, ConfigError
from megatron_rl.families.architecture import MOST_EXPERTS, MOST_LAYERS, Architecture, layer_pattern, linear_pattern
from megatron_rl.families.hf_config import HfConfig, model_directory, read_object
from megatron_rl.families.rotation import read_rotation
from megatron_rl.families.weights import WeightMap, decoder_weights
from megatron_rl.mxfp4 import MXFP4, as_matrices
from megatron_rl.registry import Registry
from megatron_rl.tensor_files import StoredTensor, TensorReader, stored_tensors

NUMBER_FORMATS = ("F32", "BF16", "F16")
"""Dtypes of weights that can be loaded."""
_LAYER = re.compile(r"model\.layers\.(\d{1,4})\.")
_DELTA_WIDTHS = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}  # fmt: skip
"""Flags (named as in ``config.json``) with transformers' defaults."""
_PASSED_OVER = (".rotary_emb.inv_freq",)
"""Endings of ignored tensors, which older files contain and every model computes itself."""
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models with the same ``config.json`` format and tensor names."""

    name: str
    """File name, and ``model_type`` in ``config.json``."""
    class_name: str
    """Entry of ``architectures`` in ``config.json``."""
    title: str
    """Display name, e.g. ``Qwen2 and Qwen2.5``."""
    read: Callable[[HfConfig], Architecture]
    """Raises ``ConfigError`` for unsupported settings."""
    weights: Callable[[Architecture], WeightMap] = decoder_weights
    later_layers: tuple[str, ...] = ()
    """Keys of ``config.json`` with the number of layers after the decoder's, for multi-token prediction (MTP).

    Their tensors are not part of the model here; exports copy them unchanged.
    """
    passed_through: tuple[str, ...] = ()
    """Name prefixes of other tensors of that kind."""
    examples: tuple[Mapping[str, Any], ...]
    """``config.json`` entries of small models that together cover all features, for the contract test."""


shared_expert_weights = partial(decoder_weights, renamed={"shared_experts": "shared_expert"})
"""`Family.weights` for families that call a layer's single shared expert so."""

SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
}  # fmt: skip
"""A small model for examples."""


SMALL_DELTA: dict[str, Any] = SMALL | {
    "head_dim": 16, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "full_attention_interval": 3, "num_hidden_layers": 3,
}  # fmt: skip
"""With recurrent states in all layers but the third."""


FAMILIES: Registry[Family] = Registry("model family", "megatron_rl.families.known", "FAMILY")


def read_decoder(
    config: HfConfig,
    *,
    activation: str = "silu",
    rotation: Mapping[str, Any] | None = None,
    quantization: str | None = None,
    **settings: Any,
) -> Architecture:
    """Read the settings that all Llama-like families share; ``settings`` are the others.

    ``activation``: the supported one of the MLP; ``rotation``: settings of rotary positions, if not written like
    Llama's; ``quantization``: a supported format of weights. Families that rotate part of each head pass
    ``rotary_percent``.
    """
    if "rotary_percent" not in settings and (share := config.rotated_share()) != 1:
        config.refuse("partial_rotary_factor", share, "whole heads are rotated")
    if settings.get("add_bias_linear"):
        config.expect("attention_bias", True, why="its projections have biases")
    elif not settings.get("add_qkv_bias"):
        config.expect("attention_bias", False, why="it would put a bias on the output projection too")
    for key in ("hidden_act", "hidden_activation"):
        config.expect(key, activation, why=f"the MLP's gate is {activation}")
    config.expect("attention_dropout", 0, why="attention kernels here have no dropout")
    method = config.within("quantization_config").get("quant_method")
    if config.get("quantization_config") and (method is None or method != quantization):
        why = "weights are read as they were trained; take the unquantised model"
        config.refuse("quantization_config", config.get("quantization_config"), why)
    heads, hidden = config.whole("num_attention_heads"), config.whole("hidden_size")
    architecture = Architecture(
        **{
            "num_layers": config.whole("num_hidden_layers"),
            "hidden_size": hidden,
            "ffn_hidden_size": settings.get("ffn_hidden_size") or config.whole("intermediate_size"),
            "num_attention_heads": heads,
            "num_query_groups": config.whole("num_key_value_heads", heads),
            "kv_channels": config.whole("head_dim", max(1, hidden // heads)),
            "vocab_size": config.whole("vocab_size"),
            "max_position_embeddings": config.whole("max_position_embeddings"),
            "norm_epsilon": config.number("rms_norm_eps", 1e-6),
            "untie_embeddings_and_output_weights": not config.switch("tie_word_embeddings", False),
            "init_method_std": config.number("initializer_range", 0.02),
            **(read_rotation(config) if rotation is None else rotation),
            **settings,
        }
    )
    if architecture.window_size is None and architecture.linear_attention_freq is None:
        config.layer_types(architecture.num_layers)
    if architecture.num_layers > MOST_LAYERS:
        config.refuse("num_hidden_layers", architecture.num_layers, f"at most {MOST_LAYERS} layers are")
    elif architecture.num_layers * (architecture.num_experts or 0) > MOST_EXPERTS:
        config.refuse("num_experts", architecture.num_experts, f"at most {MOST_EXPERTS:,} in all layers together are")
    config.check()
    return architecture


def read_sigmoid_experts(config: HfConfig) -> dict[str, Any]:
    """Read experts of DeepSeek-V3 and GLM-4.5: chosen by sigmoid score and bias, with shared experts."""
    config.expect("norm_topk_prob", True, why="weights of the chosen experts are divided by their sum")
    config.expect("scoring_func", "sigmoid", why="the router's scores are sigmoids")
    config.expect("topk_method", "noaux_tc", why="experts are chosen by score and bias")
    config.expect("moe_layer_freq", 1, why="every layer behind the first dense ones has experts")
    layers, width = config.whole("num_hidden_layers"), config.whole("moe_intermediate_size")
    count, chosen = config.whole("n_routed_experts"), config.whole("num_experts_per_tok")
    groups, of_groups = config.whole("n_group", 1), config.whole("topk_group", 1)
    if groups > 1 and (chosen // of_groups != 2 or count % groups):
        config.refuse("topk_group", of_groups, f"groups are chosen by their best two experts: {chosen} / 2 fits")
    dense = config.get("first_k_dense_replace", 0)
    if not isinstance(dense, int) or not 0 <= dense < min(layers, MOST_LAYERS):
        config.refuse("first_k_dense_replace", dense, f"at most {layers - 1} of {layers} layers are dense")
        dense = 0
    return {
        "num_experts": count,
        "moe_ffn_hidden_size": width,
        "moe_router_topk": chosen,
        "moe_layer_freq": layer_pattern([index >= dense for index in range(min(layers, MOST_LAYERS))]),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": config.number("routed_scaling_factor", 1.0),
        "moe_shared_expert_intermediate_size": width * config.whole("n_shared_experts", 1),
        **({"moe_router_num_groups": groups, "moe_router_group_topk": of_groups} if groups > 1 else {}),
    }


def read_softmax_experts(config: HfConfig, norm_topk_prob: bool = False) -> dict[str, Any]:
    """Read experts of Qwen's models: chosen by softmax, in all layers or in some."""
    # transformers 5 uses another name for the number of experts than published files.
    count = "num_experts" if config.get("num_local_experts") is None else "num_local_experts"
    step, layers = config.whole("decoder_sparse_step", 1), min(config.whole("num_hidden_layers"), MOST_LAYERS)
    dense = config.get("mlp_only_layers", [])
    if not isinstance(dense, list) or step > layers or len(dense) >= layers:
        config.refuse("mlp_only_layers", dense, "some layers have experts, and the dense ones are listed")
        step, dense = 1, []
    return {
        "num_experts": config.whole(count),
        "moe_ffn_hidden_size": config.whole("moe_intermediate_size"),
        "moe_router_topk": config.whole("num_experts_per_tok"),
        "moe_layer_freq": layer_pattern([at not in dense and (at + 1) % step == 0 for at in range(layers)]),
        # Normalised shares of the chosen experts equal a softmax over the chosen ones.
        "moe_router_pre_softmax": not config.switch("norm_topk_prob", norm_topk_prob),
    }


def read_gated_delta(config: HfConfig) -> dict[str, Any]:
    """Return the `read_decoder` settings of models with gated DeltaNet layers."""
    config.expect("attn_output_gate", True, why="the output of attention has a gate")
    layers = min(config.whole("num_hidden_layers"), MOST_LAYERS)
    every, kinds = config.whole("full_attention_interval", 4), config.get("layer_types")
    if kinds is None:
        kinds = ["full_attention" if number % every == 0 else "linear_attention" for number in range(1, layers + 1)]
    config.layer_types(config.whole("num_hidden_layers"), "linear_attention")
    has_state = [kind == "linear_attention" for kind in kinds]
    if all(has_state) or not any(has_state):
        config.refuse("layer_types", kinds[:1], "some layers have full_attention, and some linear_attention")
    settings: dict[str, Any] = {name: config.whole(name, width) for name, width in _DELTA_WIDTHS.items()}
    return settings | {
        "linear_attention_freq": linear_pattern(has_state),
        "attention_output_gate": True,
        "qk_layernorm": True,
        "apply_layernorm_1p": True,
        "rotary_percent": config.rotated_share(0.25),
    }


def read_qwen(config: HfConfig, **settings: Any) -> Architecture:
    """Call `read_decoder`; a sliding window may be configured, but not enabled."""
    config.expect("use_sliding_window", False, why="every layer attends to the whole sequence")
    config.whole("num_key_value_heads")  # its default is no function of the other sizes, so it is always written
    return read_decoder(config, **settings)


@dataclass(frozen=True)
class HfModel:
    """A directory in the Hugging Face format, and its family."""

    directory: Path
    family: Family
    architecture: Architecture
    config: dict[str, Any]
    """Unchanged ``config.json``."""

    @property
    def is_mxfp4(self) -> bool:
        """Whether its experts are stored in 4 bits."""
        return bool(self.config.get("quantization_config"))  # any other is refused

    @property
    def weights(self) -> WeightMap:
        """The Hugging Face tensors of each parameter."""
        return self.family.weights(self.architecture)

    def is_passed_through(self, tensor: str) -> bool:
        """Return whether ``tensor`` belongs to a multi-token prediction layer: see `Family.later_layers`."""
        if tensor.startswith(self.family.passed_through):
            return True
        counts = [self.config.get(name) for name in self.family.later_layers]
        count = next((number for number in counts if isinstance(number, int)), 0)
        layer, first = _LAYER.match(tensor), self.architecture.num_layers
        return layer is not None and first <= int(layer[1]) < first + count

    def passed_through(self) -> dict[str, StoredTensor]:
        """Return the tensors that exports copy unchanged.

        Raises:
            CheckpointError: the family may have such tensors, and the files are missing.
        """
        family = self.family
        stored = stored_tensors(self.directory) if family.later_layers or family.passed_through else {}
        return {name: tensor for name, tensor in stored.items() if self.is_passed_through(name)}


def read_model(directory: str | Path, weights: bool = False) -> HfModel:
    """Read ``config.json`` of a directory or Hugging Face hub name; with ``weights`` hub weights are fetched too.

    Raises:
        ConfigError: it is missing or malformed, of an unknown family, or has unsupported settings.
    """
    found = model_directory(directory, weights)
    path = found / "config.json"
    values = read_object(path)
    family = _family_of(path, values)
    return HfModel(found, family, family.read(HfConfig(path, values)), values)


def _family_of(path: Path, values: dict[str, Any]) -> Family:
    """Find the family by ``architectures``, because reward models have the same ``model_type``."""
    families = [FAMILIES.get(name) for name in FAMILIES.names()]
    classes = values.get("architectures")
    wanted = classes[0] if isinstance(classes, list) and classes else None
    for family in families:
        if wanted == family.class_name or (wanted is None and values.get("model_type") == family.name):
            return family
    listed = ", ".join(f"{family.class_name} ({family.title})" for family in families)
    what = f"architecture {wanted}" if wanted is not None else f"model_type {values.get('model_type')}"
    raise ConfigError([f"{path}: {what} is not known here; known are {listed}"])


def weight_problems(model: HfModel) -> list[str]:
    """Return the differences between the files (headers, values of a tied head) and ``config.json``, a line each."""
    try:
        stored = as_matrices(stored_tensors(model.directory))
        own_head = _has_own_head(model, stored)
    except CheckpointError as error:
        return [str(error)]
    expected, kind = model.weights.tensors, f"a {model.family.class_name} of this config.json"
    there = [name for name in expected if name in stored]
    take = "take config.json and files of one model"

    def first_of(names: list[str], what: Callable[[str], str]) -> list[str]:
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        return [f"{model.directory}: tensor {name} {what(name)}{more}" for name in names[:1]]

    return [
        *first_of([name for name in expected if name not in stored], lambda _: f"is missing, which {kind} has; {take}"),
        *first_of(
            [
                name for name in stored
                if name not in (*expected, _HEAD) and not name.endswith(_PASSED_OVER)
                and not model.is_passed_through(name)
            ],
            lambda _: f"is none that {kind} has, and would be ignored; {take}",
        ),
        *first_of(
            [name for name in there if stored[name].shape != expected[name]],
            lambda name: f"has shape {_by(stored[name].shape)}, config.json means {_by(expected[name])}; {take}",
        ),
        *first_of(
            [name for name in there if stored[name].dtype not in (*NUMBER_FORMATS, MXFP4)],
            lambda name: f"is stored as {stored[name].dtype}; use a model in {', '.join(NUMBER_FORMATS)}",
        ),
        *first_of(
            [_HEAD] if own_head else [],
            lambda _: f"differs from {_EMBEDDING} though tie_word_embeddings is true; transformers and vLLM use this "
            "head: set tie_word_embeddings to false in config.json",
        ),
    ]


def _has_own_head(model: HfModel, stored: Mapping[str, StoredTensor]) -> bool:
    """Return whether a tied model has a separate head with other values; files may repeat the embedding."""
    names = _HEAD, _EMBEDDING
    if not stored.keys() >= {*names} or _HEAD in model.weights.tensors:
        return False
    if stored[_HEAD].shape != stored[_EMBEDDING].shape:
        return True
    with TensorReader(model.directory) as reader:
        parts = zip(*(reader.pieces(name, rows=1024) for name in names), strict=True)
        return not all(head.float().equal(embedding.float()) for head, embedding in parts)


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "()"
