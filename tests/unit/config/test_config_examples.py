"""The Qwen2.5-32B command: the flags that its script gives must be valid for 64 ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_rl.config.arguments import read_config
from megatron_rl.config.rl_config import all_flags
from megatron_rl.config.rules import notes, validate
from megatron_rl.run.preflight.machine import recipe_problems
from tests.support.flags import parse_config
from tests.support.recipes import launched
from tests.unit.families.test_published_models import PUBLISHED

EXAMPLE = Path(__file__).parents[3] / "examples" / "qwen2p5_32b_grpo"
EXPERTS = EXAMPLE.with_name("qwen3_30b_a3b_fp8") / "fp8_rollouts.sh"

PUBLISHED_COMMAND = """
--perform-rl-step --mock-data --seed 42 --train-samples 48828125 --micro-batch-size 1 --global-batch-size 1024
--langrl-env-config dapo.yaml --env-config environments.yaml --rl-prompts-per-eval 32 --eval-interval 20
--grpo-group-size 16 --grpo-prompts-per-step 64 --grpo-iterations 1 --grpo-kl-beta 0.0 --grpo-clamp-eps-lower 0.2
--grpo-clamp-eps-upper 0.28 --calculate-per-token-loss --num-layers 64 --hidden-size 5120 --ffn-hidden-size 27648
--num-attention-heads 40 --group-query-attention --num-query-groups 8 --max-position-embeddings 131072
--position-embedding-type rope --use-rotary-position-embeddings --rotary-percent 1.0 --rotary-base 1000000
--normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear --add-qkv-bias
--untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 --use-mcore-models
--tokenizer-type HuggingFaceTokenizer --tokenizer-model unsloth/Qwen2.5-32B --make-vocab-size-divisible-by 128
--tensor-model-parallel-size 8 --pipeline-model-parallel-size 1 --sequence-parallel --use-distributed-optimizer
--data-parallel-random-init --initialize-socket-comms --distributed-timeout-minutes 60 --bf16
--accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --no-masked-softmax-fusion --te-rng-tracker
--attention-backend flash --cuda-graph-impl local --recompute-granularity selective --recompute-activations
--transformer-impl transformer_engine --seq-length 11999 --inference-max-seq-length 11999 --inference-max-requests 32
--inference-num-cuda-graphs 1 --inference-buffer-size-gb 20 --empty-unused-memory-level 2 --lr 1e-6
--lr-warmup-samples 0 --clip-grad 1.0 --weight-decay 0.0 --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8
--no-create-attention-mask-in-dataloader --data-cache-path DIR/data_cache --pretrained-checkpoint DIR --finetune
--save DIR/checkpoints --load DIR/checkpoints --save-interval 20 --ckpt-format torch --tensorboard-dir DIR/tensorboard
--tensorboard-log-interval 1 --wandb-project P --wandb-exp-name N --log-interval 10 --log-progress --log-params-norm
--log-num-zeros-in-grad --log-throughput --log-straggler --disable-straggler-on-startup --straggler-minmax-count 16
--log-timers-to-tensorboard --timing-log-level 1 --timing-log-option minmax
"""
"""Flags and values of Megatron-LM's examples/rl/README.md, 64 ranks."""
DIFFERENT = {
    "langrl_env_config", "ckpt_format", "save", "load", "tensorboard_dir", "run_dir", "config",
    "wandb_project", "wandb_exp_name", "wandb_save_dir", "pretrained_checkpoint", "finetune", "resume", "log_interval",
    "enable_cuda_graph", "rl_offload_optimizer_during_inference",
}  # fmt: skip
"""Where the recipe's values are others: places, CUDA graphs by default, and what its files say why."""


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of the recipe, from a directory of checkpoints."""
    return [*launched(EXAMPLE / "run.sh", CHECKPOINT=str(tmp_path_factory.mktemp("checkpoints"))).flags]


def test_the_published_command_is_taken_but_for_its_format_of_checkpoints() -> None:
    config, problems = read_config(PUBLISHED_COMMAND.split(), 64)
    (refused,) = map(str, problems)
    assert refused.startswith("--ckpt-format torch is read but not written")
    assert config.training.rl_sequence_packing_bin_size == 11999
    assert config.padded_bin_size == 12000, "what eight ranks share evenly"


@pytest.mark.parametrize("recipe", ["int8", "fp8", "fp8_block"])
def test_its_rollouts_may_be_in_8_bits_on_transformer_engines_layers(flags: list[str], recipe: str) -> None:
    """On the parts that eight ranks have of each; so may its training."""
    training = ("--fp8-format", "e4m3", "--fp8-recipe", "blockwise")
    for more in ((), training):
        config, problems = read_config([*flags, "--rl-rollout-quantization", recipe, *more], 64)
        assert [*problems, *recipe_problems(config)] == []
        assert config.kernels.transformer_impl == "transformer_engine"


def test_the_recipe_is_the_published_command(flags: list[str]) -> None:
    published, own = (read_config(words, 64)[0] for words in (PUBLISHED_COMMAND.split(), flags))
    differing = {flag.name for flag in all_flags() if published.value(flag.name) != own.value(flag.name)}
    assert differing == DIFFERENT


def test_it_is_valid_on_64_ranks(flags):
    config, problems = read_config(flags, 64)
    assert problems == validate(config, 64) == []
    assert config.data_parallel_size(64) == 8


def test_its_values_arrive(flags):
    config, _ = read_config(flags, 64)
    model, algorithm = config.model, config.algorithm
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (64, 5120, 27648)
    assert (model.num_attention_heads, model.num_query_groups, model.kv_channels) == (40, 8, 128)
    assert (model.rotary_base, model.add_bias_linear, model.add_qkv_bias) == (1000000, False, True)
    assert algorithm.rl_policy_loss_args == ("clamp_eps_lower=0.2", "clamp_eps_upper=0.28")
    assert config.samples_per_step == config.training.global_batch_size == 1024
    assert config.total_steps == 47683
    # 2 x 64 layers x 1 head a rank x 128 channels x 2 bytes a token.
    assert config.kv_cache_bytes(12000) == 12000 * 32768


def test_flags_without_effect_are_noted(flags):
    noted = {line.split()[0] for line in notes(parse_config(flags))}
    assert {"--mock-data", "--initialize-socket-comms", "--use-mcore-models"} <= noted
    assert not {"--sequence-parallel", "--grpo-group-size"} & noted


def test_a_directory_of_checkpoints_is_where_it_starts(tmp_path):
    flags = launched(EXAMPLE / "run.sh", CHECKPOINT=str(tmp_path), TOKENIZER="words").flags
    config, problems = read_config(flags, 64)
    assert problems == []
    assert (config.checkpoint.pretrained_checkpoint, config.checkpoint.load_hf) == (str(tmp_path), None)
    assert config.tokenizer.tokenizer_model == "words"


def test_a_hugging_face_directory_is_where_it_starts_too(tmp_path):
    """Every flag of the shape agrees with the config.json that the model is published with."""
    config_json = PUBLISHED["Qwen2.5-32B"][0]
    (tmp_path / "config.json").write_text(json.dumps(config_json))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    config, problems = read_config(launched(EXAMPLE / "run.sh", CHECKPOINT=str(tmp_path)).flags, 64)
    assert problems == []
    assert (config.checkpoint.pretrained_checkpoint, config.checkpoint.load_hf) == (None, str(tmp_path))
    assert config.tokenizer.tokenizer_model == str(tmp_path)
    assert config.tokenizer.vocab_size == config_json["vocab_size"]


@pytest.mark.parametrize("layout", [{"PP": "2"}, {"TP": "4", "PP": "2"}, {"CP": "2"}, {"PP": "4", "CP": "2"}])
def test_its_layouts_are_valid(layout, tmp_path):
    config, problems = read_config(launched(EXAMPLE / "run.sh", CHECKPOINT=str(tmp_path), **layout).flags, 64)
    assert problems == []
    parallel, ranks = config.parallel, {"TP": "8", "PP": "1", "CP": "1"} | layout
    assert parallel.tensor_model_parallel_size == int(ranks["TP"])
    assert parallel.pipeline_model_parallel_size == int(ranks["PP"])
    assert parallel.context_parallel_size == int(ranks["CP"])


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    """What a checkpoint of Qwen3-30B-A3B says of its shape."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-30B-A3B"][0]))
    return tmp_path


LAYOUTS = {
    "PP 2": {"pipeline-model-parallel": 2},
    "TP 1": {"tensor-model-parallel": 1},
    "EP 4": {"expert-model-parallel": 4},
    "TP 1, CP 2": {"tensor-model-parallel": 1, "context-parallel": 2},
    "TP 1, EP 1, PP 4": {"tensor-model-parallel": 1, "expert-model-parallel": 1, "pipeline-model-parallel": 4},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_other_layouts_of_the_recipe_with_experts_are_valid(experts: Path, name: str) -> None:
    launch = launched(EXPERTS, MODEL=str(experts))
    changes = [word for flag, size in LAYOUTS[name].items() for word in (f"--{flag}-size", str(size))]
    config, problems = read_config([*launch.flags, "--tokenizer-model", "unused", *changes], launch.ranks)
    assert problems == []
    assert config.parallel.expert_model_parallel_size == LAYOUTS[name].get("expert-model-parallel", 8)


def test_a_wrong_size_would_be_seen(flags):
    assert len(validate(parse_config([*flags, "--num-attention-heads", "41"]), 64)) == 3


def test_its_environment_list_is_where_the_script_says(flags):
    path = parse_config(flags).environment.langrl_env_config
    assert (EXAMPLE.parents[1] / path).is_file()
