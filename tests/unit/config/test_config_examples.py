"""The Qwen2.5-32B command: the flags that its script gives must be valid for 64 ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_rl.config import notes, read_config, validate
from tests.support.flags import parse_config
from tests.support.recipes import launched
from tests.unit.families.test_published_models import PUBLISHED

EXAMPLE = Path(__file__).parents[3] / "examples" / "qwen2p5_32b_grpo"
EXPERTS = EXAMPLE.with_name("qwen3_30b_a3b_fp8") / "fp8_rollouts.sh"

PROMISED = """
--perform-rl-step --langrl-env-config --env-config --langrl-inference-server-type --grpo-prompts-per-step
--grpo-group-size --grpo-iterations --grpo-clamp-eps-lower --grpo-clamp-eps-upper --grpo-kl-beta
--rl-prompts-per-eval --inference-max-batch-size --inference-max-seq-length
--inference-dynamic-batching-buffer-size-gb --inference-dynamic-batching-num-cuda-graphs --enable-cuda-graph
--te-rng-tracker --use-distributed-optimizer --sequence-parallel --recompute-granularity
--recompute-activations --pretrained-checkpoint --load --save --finetune --ckpt-format
--calculate-per-token-loss --log-straggler --log-throughput --log-params-norm --log-num-zeros-in-grad
--tensorboard-dir --wandb-project --wandb-exp-name --empty-unused-memory-level --mock-data --train-samples
--timing-log-level --initialize-socket-comms
"""


def _flags(script: Path, **variables: str) -> list[str]:
    return [*launched(script, **variables).flags]


@pytest.fixture(scope="module")
def flags() -> list[str]:
    return _flags(EXAMPLE / "run.sh")


def test_it_has_every_promised_flag(flags):
    assert [flag for flag in PROMISED.split() if flag not in flags] == []


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
    assert (algorithm.grpo_clamp_eps_lower, algorithm.grpo_clamp_eps_upper) == (0.2, 0.28)
    assert config.samples_per_step == config.training.global_batch_size == 1024
    assert config.total_steps == 47683
    # 2 x 64 layers x 1 head a rank x 128 channels x 2 bytes a token.
    assert config.kv_cache_bytes(12000) == 12000 * 32768


def test_flags_without_effect_are_noted(flags):
    noted = {line.split()[0] for line in notes(parse_config(flags))}
    assert {"--mock-data", "--initialize-socket-comms", "--use-mcore-models"} <= noted
    assert not {"--sequence-parallel", "--grpo-group-size"} & noted


def test_a_directory_of_checkpoints_is_where_it_starts(tmp_path):
    flags = _flags(EXAMPLE / "run.sh", CHECKPOINT=str(tmp_path), TOKENIZER="words")
    config, problems = read_config(flags, 64)
    assert problems == []
    assert (config.checkpoint.pretrained_checkpoint, config.checkpoint.load_hf) == (str(tmp_path), None)
    assert config.tokenizer.tokenizer_model == "words"


def test_a_hugging_face_directory_is_where_it_starts_too(tmp_path):
    """Every flag of the shape agrees with the config.json that the model is published with."""
    config_json = PUBLISHED["Qwen2.5-32B"][0]
    (tmp_path / "config.json").write_text(json.dumps(config_json))
    config, problems = read_config(_flags(EXAMPLE / "run.sh", CHECKPOINT=str(tmp_path)), 64)
    assert problems == []
    assert (config.checkpoint.pretrained_checkpoint, config.checkpoint.load_hf) == (None, str(tmp_path))
    assert config.tokenizer.tokenizer_model == str(tmp_path)
    assert config.tokenizer.vocab_size == config_json["vocab_size"]


@pytest.mark.parametrize("layout", [{"PP": "2"}, {"TP": "4", "PP": "2"}, {"CP": "2"}, {"PP": "4", "CP": "2"}])
def test_its_layouts_are_valid(layout):
    config, problems = read_config(_flags(EXAMPLE / "run.sh", **layout), 64)
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
