"""`megatron-rl convert`: configurations of other trainers as ours, row by row of the table of docs/coming_from.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from megatron_rl import cli
from megatron_rl.cli.convert import converted, settings_of
from megatron_rl.config.arguments import foreign_flags, read_flags

VERL = """
data: {train_files: x.parquet, train_batch_size: 64, max_prompt_length: 512, max_response_length: 1024}
actor_rollout_ref:
  model: {path: DIR, lora_rank: 8, lora_alpha: 16, target_modules: all-linear}
  actor: {ppo_mini_batch_size: 32, use_kl_loss: true, kl_loss_coef: 0.001, kl_loss_type: low_var_kl, optim: {lr: 1e-6},
          clip_ratio: 0.2, strategy: fsdp}
  rollout: {n: 8, temperature: 1.0, tensor_model_parallel_size: 2}
algorithm: {adv_estimator: grpo, norm_adv_by_std_in_grpo: false}
trainer: {total_training_steps: 100, test_freq: -1, experiment_name: "${trainer.project_name}"}
"""
TRL = """
from trl import GRPOConfig
steps = 5
args = GRPOConfig(output_dir="out", learning_rate=1e-6, num_generations=8, max_steps=steps, bf16=True, top_p=0.9,
                  gradient_checkpointing=True, loss_type="dr_grpo", report_to="wandb", mask_truncated_completions=False)
adapters = peft.LoraConfig(r=16, lora_alpha=64, target_modules=["q_proj", "v_proj"], lora_dropout=0.05)
open("ran", "w")
"""


SKYRL = """
set -x
# colocated, on one machine
DATA_DIR="$HOME/data/gsm8k"
NUM_GPUS=4
: "${LOGGER:=console}"
uv run --isolated --extra vllm -m skyrl_train.entrypoints.main_base \\
  data.train_data="['$DATA_DIR/train.parquet']" \\
  trainer.algorithm.advantage_estimator="grpo" \\
  trainer.policy.model.path="DIR" \\
  trainer.placement.policy_num_gpus_per_node=$NUM_GPUS \\
  trainer.train_batch_size=1024 trainer.policy_mini_batch_size=256 generator.n_samples_per_prompt=5 \\
  trainer.policy.optimizer_config.lr=1.0e-6 trainer.algorithm.use_kl_loss=true \\
  +trainer.algorithm.kl_loss_coef=0.01 trainer.algorithm.clip_ratio_c=3.0 trainer.algorithm.policy_loss_type=regular \\
  trainer.max_prompt_length=512 generator.sampling_params.max_generate_length=1024 \\
  trainer.ckpt_path="${CKPTS:-out}" $@
"""
NEMO = """
grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16, max_num_steps: 500, normalize_rewards: true,
       use_leave_one_out_baseline: true, async_grpo: {enabled: false, max_trajectory_age_steps: 1}}
loss_fn: {reference_policy_kl_penalty: 0.01, ratio_clip_min: 0.2, ratio_clip_max: 0.28, token_level_loss: true}
policy:
  model_name: DIR
  train_global_batch_size: 512
  max_total_sequence_length: 512
  precision: bfloat16
  dtensor_cfg: {enabled: true, tensor_parallel_size: 2}
  megatron_cfg: {enabled: false, tensor_model_parallel_size: 8, optimizer: {lr: 9.0e-6}}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6, betas: [0.9, 0.999]}}
  max_grad_norm: 1.0
  generation: {max_new_tokens: 256, temperature: 1.0, top_k: null}
logger: {wandb: {project: math, name: "${policy.model_name}"}}
cluster: {gpus_per_node: 8}
"""


def _convert(path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, object], list[str]]:
    path.write_text(text)
    assert cli.main(["convert", str(path)]) == 0
    written = capsys.readouterr().out
    (path.parent / "ours.yaml").write_text(written)
    reading = read_flags(["--config", str(path.parent / "ours.yaml")])
    assert [each for each in reading.problems if each.flag != "--load-hf"] == [], "it is a configuration of ours"
    return yaml.safe_load(written), [line for line in written.splitlines() if line.startswith("#")]


def test_verl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags, comments = _convert(tmp_path / "verl.yaml", VERL, capsys)
    assert {name: str(value) for name, value in flags.items()} == {
        "perform-rl-step": "True", "load-hf": "DIR", "grpo-prompts-per-step": "64", "grpo-group-size": "8",
        "global-batch-size": "256", "rl-max-new-tokens": "1024", "seq-length": "1536", "lr": "1e-6",
        "rl-advantage": "dr_grpo", "grpo-clamp-eps-lower": "0.2", "grpo-clamp-eps-upper": "0.2",
        "grpo-kl-beta": "0.001", "rl-kl-estimator": "k3", "tensor-model-parallel-size": "2", "rl-temperature": "1.0",
        "train-iters": "100", "check-world-size": "2",
        "lora-rank": "8", "lora-alpha": "16", "lora-targets": "all",
    }  # fmt: skip
    assert comments[:6] == [
        "# data.train_files: x.parquet  (use --langrl-env-config)",
        "# actor.use_kl_loss: True  (see --grpo-kl-beta)",
        "# actor.strategy: fsdp  (the trainer is megatron-core, its attention --attention-backend)",
        "# algorithm.adv_estimator: grpo  (algorithm.norm_adv_by_std_in_grpo sets --rl-advantage)",
        "# trainer.test_freq: -1  (--eval-interval must be at least 1, got -1)",
        "# trainer.experiment_name: ${trainer.project_name}  (it refers to another setting; use --wandb-exp-name)",
    ]
    assert [line.partition(" is")[0] for line in comments[6:]] == ["# --langrl-env-config", "# --run-dir"]


def test_trls_python_is_parsed_and_never_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags, comments = _convert(tmp_path / "grpo_config.py", TRL, capsys)
    assert not Path("ran").exists() and not (tmp_path / "ran").exists()
    assert flags["run-dir"] == "out" and float(str(flags["lr"])) == 1e-6 and str(flags["grpo-group-size"]) == "8"
    assert flags["recompute-granularity"] == "full" and flags["rl-loss-aggregation"] == "constant"
    assert "rl-truncated" not in flags
    assert flags["lora-rank"] == 16 and flags["lora-alpha"] == 64 and flags["lora-targets"] == ["q_proj", "v_proj"]
    names = ["max_steps", "top_p", "report_to", "mask_truncated_completions", "peft_config.lora_dropout"]
    missing = ["--load-hf", "--langrl-env-config", "--grpo-prompts-per-step", "--seq-length", "--train-iters"]
    assert {re.split(": | is ", line[2:])[0] for line in comments} == {*names, *missing}


def test_skyrls_script_of_overrides_is_parsed_and_never_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags, comments = _convert(tmp_path / "run.sh", SKYRL, capsys)
    assert {name: str(value) for name, value in flags.items()} == {
        "perform-rl-step": "True", "load-hf": "DIR", "grpo-prompts-per-step": "1024", "grpo-group-size": "5",
        "global-batch-size": "1280", "rl-max-new-tokens": "1024", "seq-length": "1536", "lr": "1e-06",
        "rl-advantage": "grpo", "rl-policy-loss": "clip", "grpo-kl-beta": "0.01", "run-dir": "out",
    }  # fmt: skip
    assert comments[2].startswith("# data.train_data: ['$HOME/data/gsm8k/train.parquet']  (it refers to another")
    assert [line for line in comments if not line.startswith(("# --", "# data."))] == [
        "# trainer.placement.policy_num_gpus_per_node: 4  (use torchrun --nproc-per-node)",
        "# trainer.algorithm.use_kl_loss: True  (see --grpo-kl-beta)",
        "# trainer.algorithm.clip_ratio_c: 3.0  (only with trainer.algorithm.policy_loss_type=dual_clip)",
    ]


def test_of_nemo_rl_a_section_that_is_off_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags, comments = _convert(tmp_path / "grpo.yaml", NEMO, capsys)
    assert {name: str(value) for name, value in flags.items()} == {
        "perform-rl-step": "True", "load-hf": "DIR", "grpo-prompts-per-step": "32", "grpo-group-size": "16",
        "train-iters": "500", "grpo-kl-beta": "0.01", "grpo-clamp-eps-lower": "0.2", "grpo-clamp-eps-upper": "0.28",
        "global-batch-size": "512", "seq-length": "512", "rl-max-new-tokens": "256", "bf16": "True",
        "clip-grad": "1.0", "lr": "5e-06", "tensor-model-parallel-size": "2", "rl-temperature": "1.0",
        "check-world-size": "2", "wandb-project": "math", "wandb-exp-name": "DIR",
    }  # fmt: skip
    assert [line for line in comments if not line.startswith("# --")] == [
        "# grpo.normalize_rewards: True  (there is no setting here for this value)",
        "# grpo.use_leave_one_out_baseline: True  (docs/coming_from.md says why there is none)",
        "# grpo.async_grpo.enabled: False  (its section is off)",
        "# grpo.async_grpo.max_trajectory_age_steps: 1  (its section is off)",
        "# loss_fn.token_level_loss: True  (there is no setting here for this value)",
        "# policy.dtensor_cfg.enabled: True  (there is no setting here)",
        "# policy.megatron_cfg.enabled: False  (its section is off)",
        "# policy.megatron_cfg.tensor_model_parallel_size: 8  (its section is off)",
        "# policy.megatron_cfg.optimizer.lr: 9e-06  (its section is off)",
        "# policy.optimizer.name: torch.optim.AdamW  (there is no setting here)",
        "# policy.optimizer.kwargs.betas: [0.9, 0.999]  (there is no setting here)",
        "# policy.generation.top_k: None  (unset)",
        "# cluster.gpus_per_node: 8  (use torchrun --nproc-per-node)",
    ]


TURNED_ON = {"use_peft": True, "actor.use_kl_loss": True, "trainer.algorithm.policy_loss_type": "dual_clip"}
"""What others of the table act with alone."""


@pytest.mark.parametrize("word", sorted(foreign_flags()))
def test_each_word_of_the_table_is_a_flag_or_a_comment_that_names_it(word: str) -> None:
    key, _, wanted = word.partition("=")
    lines = list(converted(TURNED_ON | {key: yaml.safe_load(wanted) if wanted else 1}))
    line = next(line for line in lines if re.search(rf"(# |, ){re.escape(key)}(:|,|$)", line))
    flags = re.findall(r"--([a-z-]+)", foreign_flags()[word])
    if line.startswith("# "):
        assert re.search(r"\(.+\)$", line), "with a reason"
        assert not flags or any(flag in line for flag in flags) or "there is no setting here for" in line
    else:
        assert f"--{line.partition(':')[0]}" in foreign_flags()[word]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"data.max_prompt_length": 512, "data.max_response_length": 1024}, "seq-length: 1536"),
        ({"generation_batch_size": 64, "num_generations": 8}, "grpo-prompts-per-step: 8"),
        (
            {"generation_batch_size": 64, "num_generations": 0},
            "# num_generations: 0  (--grpo-group-size must be at least 1, got 0)",
        ),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}, "global-batch-size: 8"),
        ({"actor.kl_loss_coef": 0.1}, "# actor.kl_loss_coef: 0.1  (only with actor.use_kl_loss=True)"),
        ({"use_peft": True, "lora_r": 8, "lora_alpha": 16, "lora_target_modules": "all-linear"}, "lora-targets: all"),
        ({"lora_r": 8}, "# lora_r: 8  (only with use_peft=True)"),
        ({"model.lora_rank": 8, "model.lora_adapter_path": "DIR"}, "load-lora: DIR"),
        (
            {"model.lora_rank": 0, "model.lora_alpha": 16},
            "# model.lora_alpha: 16  (--lora-alpha 16 has no effect without adapters; add --lora-rank",
        ),
        ({"algorithm.adv_estimator": "gae", "algorithm.norm_adv_by_std_in_grpo": False}, "rl-advantage: gae"),
        ({"rollout.quantization": "fp8"}, "rl-rollout-quantization: fp8"),
        ({"rollout.quantization": "torchao"}, "# rollout.quantization: torchao  (--rl-rollout-quantization torchao"),
        ({"rollout.enforce_eager": True}, "no-enable-cuda-graph: true"),
        ({"rollout.enforce_eager": False}, "# rollout.enforce_eager: False  (the default here)"),
        ({"model.enable_gradient_checkpointing": True}, "recompute-granularity: full"),
        ({"model.enable_gradient_checkpointing": False}, "# model.enable_gradient_checkpointing: False  (off by"),
        ({"actor.megatron.override_transformer_config.fp8": "hybrid",
          "actor.megatron.override_transformer_config.fp8_recipe": "tensorwise",
          "actor.megatron.override_transformer_config.transformer_impl": "transformer_engine",
          "rollout.dtype": "bfloat16"}, "fp8-format: hybrid"),
        ({"policy.megatron_cfg.moe_router_dtype": "fp32"}, "# policy.megatron_cfg.moe_router_dtype: fp32  (there"),
        ({"trainer.critic_warmup": 0}, "# trainer.critic_warmup: 0  (--rl-critic-warmup-steps 0 has no effect without"),
        ({"algorithm.use_kl_in_reward": False}, "# algorithm.use_kl_in_reward: False  (off by default)"),
        ({"algorithm.use_kl_in_reward": True}, "# algorithm.use_kl_in_reward: True  (--rl-kl-in-reward has no effect"),
        ({"vllm_importance_sampling_cap": 2.0}, "# vllm_importance_sampling_cap: 2.0  (--rl-correction none has no"),
        ({"vllm_importance_sampling_correction": True, "vllm_importance_sampling_cap": 3.0}, "rl-correction-cap: 3.0"),
        ({"algorithm.rollout_correction.rollout_is": "token",
          "algorithm.rollout_correction.rollout_rs": "geometric"}, "rl-correction: geometric+token_tis"),
        ({"algorithm.rollout_correction.rollout_rs_threshold": "0.5_2.0"}, "# algorithm.rollout_correction.rollout_rs"),
        ({"rollout.tensor_model_parallel_size": 8, "actor.megatron.tensor_model_parallel_size": 4},
         "tensor-model-parallel-size: 4"),
        ({"vllm_tensor_parallel_size": 4}, "check-world-size: 4"),
        ({"trainer.nnodes": 2, "trainer.n_gpus_per_node": 8}, "check-world-size: 16"),
        ({"rollout.tensor_model_parallel_size": 3, "trainer.nnodes": 1, "trainer.n_gpus_per_node": 8},
         "# rollout.tensor_model_parallel_size: 3  (world size 8 is not divisible by 3"),
        ({"trainer.logger": ["console"], "trainer.project_name": "x"}, "# trainer.project_name: x  (only with"),
        ({"learning_rate": "1e-5", "lr_scheduler_kwargs.min_lr_rate": 0.1}, "min-lr: 1e-06"),
        ({"learning_rate": "1e-5", "lr_scheduler_kwargs.num_cycles": 2}, "lr: 1e-5"),
        ({"fp16": True}, "# fp16: True  (there is no setting here"),
        ({"per_device_train_batch_size": 3, "gradient_accumulation_steps": 5, "num_generations": 8,
          "generation_batch_size": 64}, "# gradient_accumulation_steps: 5  (--global-batch-size 15 does not divide"),
        ({"x.y": None}, "# x.y: None  (unset)"),
        ({"max_prompt_length": 1e308, "max_completion_length": 5}, "# max_prompt_length: 1e+308  (--seq-length is"),
        ({"--rl-importance-sampling-truncation-coef": 2}, "# --rl-importance-sampling-truncation-coef: 2  (--rl-corr"),
        ({"num_generations": 8, "max_length": 2048, "beta": 0.1}, "perform-rl-step: true"),
        ({"--squared-relu": True}, "# --squared-relu: True  (there is no setting here)"),
        ({"--no-masked-softmax-fusion": True}, "# --no-masked-softmax-fusion: True  (megatron-core's fused kernels"),
        ({"--disable-bias-linear": True}, "disable-bias-linear: True"),
    ],
)  # fmt: skip
def test_settings_that_belong_together(settings: dict, line: str) -> None:
    lines = list(converted(settings))
    assert any(each.startswith(line) for each in lines), lines


@pytest.mark.parametrize("name", ["algorithm.adv_estimator", "rollout.quantization", "--rl-group-filter"])
def test_code_that_a_setting_names_is_not_run(name: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass X: pass\n")
    lines = list(converted({name: f"{tmp_path}/own.py:X", "num_generations": 8}))
    assert any(line.startswith(f"# {name}") and "(it names code; use --rl-" in line for line in lines), lines
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("A=$((1024 * 2))\nB=$((A + 512))\nx.a=$B", {"x.a": 2560}),
        ("A=3\nB=$(((A + 1) * (2 + 2) / 3))\nx.a=${B}", {"x.a": 5}),
        ("x.a=$((UNKNOWN * 2))", {"x.a": "$((UNKNOWN*2))"}),
        ('D=${D:-"${HOME}/verl"}\nM=${M:-"${D}/m"}\nx.a="${M}"', {"x.a": "$HOME/verl/m"}),
        ("F=(\n +x.a='e4m3' # why\n x.b=1\n)\nrun \"${F[@]}\" x.c=2 $@", {"x.a": "e4m3", "x.b": 1, "x.c": 2}),
        ("O=' --lr 1e-6 --bf16 --moe-layer-freq ([0]*1+[1]*2) '\ntorchrun --nproc-per-node 8 x.py $O --seed=3",
         {"--lr": "1e-6", "--bf16": True, "--moe-layer-freq": "([0]*1+[1]*2)", "--nproc-per-node": 8, "--seed": 3}),
        ("p x.py --learning_rate 1e-6 --use_peft --lora_target_modules 'q_proj', 'v_proj' --num_generations=8",
         {"learning_rate": "1e-6", "use_peft": True, "num_generations": 8,
          "lora_target_modules": ["q_proj", "v_proj"]}),
        ("p --system_prompt 'a: b: c'", {"system_prompt": "a: b: c"}),
        ("x.a='[\"console\",\"wandb\"]' x.b=null", {"x.a": ["console", "wandb"], "x.b": None}),
    ],
)  # fmt: skip
def test_what_scripts_write(script: str, expected: dict, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(script)
    found = settings_of(str(tmp_path / "run.sh"))
    assert {name if name in expected else f"--{name}": value for name, value in found.items()} == expected


@pytest.mark.parametrize(
    ("program", "line"),
    [
        ("GRPOTrainer('Qwen/Qwen3-0.6B', reward, args=c)", "load-hf: Qwen/Qwen3-0.6B  # model"),
        ("GRPOTrainer('Qwen/Qwen3-0.6B', reward)", "# reward_funcs: $reward  (it refers to another setting"),
        ("trl.GRPOTrainer(train_dataset=load_dataset('a/b'))", "# train_dataset: $load_dataset('a/b')  (it refers"),
        ("GRPOConfig(**more)", "# **: $more  (there is no setting here)"),
        ("SFTConfig(max_length=512)", "seq-length: 512  # max_length"),
    ],
)
def test_what_programs_write(program: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(program)
    lines = list(converted(settings_of(str(tmp_path / "train.py"))))
    assert any(each.startswith(line) for each in lines), lines
    assert ("perform-rl-step: true" in lines) == ("SFT" not in program)


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.yaml", "- 1", "it has no settings"),
        ("a.py", "x = (", "was never closed"),
        ("a.py", "x = 1", "no settings"),
        ("a.py", "DPOConfig(beta=0.1)", "it calls DPOConfig; only"),
        ("a.py", "KTOTrainer()\nLoraConfig(r=1)", "it calls KTOTrainer"),
        ("a.yaml", "{beta: 1, max_length: 9}", "is of DPO"),
        ("a.sh", "x.a='", "No closing quotation"),
    ],
)
def test_what_cannot_be_read(
    name: str, text: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    assert cli.main(["convert", str(tmp_path / name)]) == 2
    assert line in capsys.readouterr().err
