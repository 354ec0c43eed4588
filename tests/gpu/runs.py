"""Short GRPO runs through `train_rl.py` on one GPU: every family with random weights, and the features beside CUDA.

    python -m tests.gpu.runs                all of them, eight at a time
    python -m tests.gpu.runs NAME [NAME]    some, one after another

Models have heads and experts wide enough for the kernels. A line a run: the largest log-prob mismatch, or what went
wrong. Without a CUDA device they run on the CPU in fp32, which rehearses them.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import yaml

ROOT = Path(__file__).parents[2]
AT_ONCE = 8
LIMIT = 180.0
"""Seconds of a run."""
WIDE = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_key_value_heads": 4
}  # fmt: skip
FP8, INT8 = "--rl-rollout-quantization=fp8", "--rl-rollout-quantization=int8"
ALIGNED = "--rl-rollout-quantization=fp8_block --rl-train-forward=quantized --rl-train-backward=quantized"
MOMENTS = "--use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype=fp8 --exp-avg-sq-dtype=fp8"
CRITIC = "--rl-advantage=gae"
RUNS = {
    "qwen3, KL": ("qwen3", "--grpo-kl-beta=0.01"),
    "qwen3, fp8": ("qwen3", FP8),
    "qwen3, int8, fp8 cache": ("qwen3", f"{INT8} --rl-kv-cache-dtype=fp8 --rl-share-prompts"),
    "qwen3, aligned training": ("qwen3", ALIGNED),
    "qwen3, LoRA, critic": ("qwen3", f"{FP8} --lora-rank=8 {CRITIC} --rl-critic-lora-rank=8"),
    "qwen3, critic": ("qwen3", f"{CRITIC} --rl-share-prompts"),
    "qwen3, offload": ("qwen3", f"--rl-offload-optimizer-during-inference --async-save {MOMENTS}"),
    "qwen3_moe, fp8": ("qwen3_moe", FP8),
    "qwen3_moe, int8": ("qwen3_moe", INT8),
    "deepseek_v3": ("deepseek_v3", ""),
    "deepseek_v3, fp8": ("deepseek_v3", FP8),
    "gpt_oss": ("gpt_oss", ""),
    "gpt_oss, fp8, router replay": ("gpt_oss", f"{FP8} --rl-router-replay"),
    "gemma3_text": ("gemma3_text", ""),
    "olmo3, fp8": ("olmo3", FP8),
    "glm4_moe, int8": ("glm4_moe", INT8),
    "qwen3_5_text": ("qwen3_5_text", ""),
    "qwen3_next": ("qwen3_next", ""),
}
"""Name -> family and flags, beside bf16 and CUDA graphs."""


def write_model(directory: Path, family: str, **sizes: int) -> None:
    """Save a random bf16 model of ``family`` with these ``sizes`` (``config.json``), and the quickstart's tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from megatron_rl.families.family import FAMILIES

    settings = dict(FAMILIES.get(family).examples[0])
    wide = {name: size for name, size in WIDE.items() if name in settings}
    settings |= wide | (LATENT if "kv_lora_rank" in settings else {}) | sizes
    settings |= {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).bfloat16().save_pretrained(directory)
    runpy.run_path(str(ROOT / "examples/quickstart/make_tokenizer.py"))["main"](directory)
    (directory / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")


def write_tasks(folder: Path) -> Path:
    """Write sums whose answers are rewarded by the parity of a checksum, so that every group has a signal."""
    rows = [json.dumps({"question": f"{a}+{b}=", "answer": str(a + b)}) for a in range(10) for b in range(10)]
    (folder / "sums.jsonl").write_text("\n".join(rows))
    parity = "float(zlib.crc32(str(completion).encode()) % 2)"
    reward = f"import zlib\n\n\ndef reward(completion, row):\n    return {parity}\n"
    (folder / "parity.py").write_text(reward)
    given = {"path": str(folder / "sums.jsonl"), "prompt": "question", "answer": "answer"}
    entry = {"environment": "dataset", "name": "sums", "args": given | {"reward": f"{folder / 'parity.py'}:reward"}}
    (folder / "environments.yaml").write_text(yaml.safe_dump([entry]))
    return folder / "environments.yaml"


def run(name: str, folder: Path) -> tuple[str, bool, float, str]:
    """The run's name, whether it ended well, its seconds, and its mismatch or its error."""
    family, flags = RUNS[name]
    started, run_dir = time.monotonic(), folder / "runs" / name.replace(", ", "_").replace(" ", "_")
    on_gpu = ["--bf16", "--enable-cuda-graph"] if torch.cuda.is_available() else []
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "train_rl.py",
        "--perform-rl-step", f"--load-hf={folder / family}", f"--langrl-env-config={folder / 'environments.yaml'}",
        f"--run-dir={run_dir}", "--train-iters=3", "--grpo-prompts-per-step=8", "--grpo-group-size=4",
        "--seq-length=128", "--micro-batch-size=8", "--lr=1e-4", "--rl-max-new-tokens=24", *on_gpu, *flags.split(),
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    limit = LIMIT if torch.cuda.is_available() else 10 * LIMIT
    try:
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return name, False, limit, "still running"
    (folder / f"{run_dir.name}.log").write_text(ended.stdout + ended.stderr)
    took = time.monotonic() - started
    if ended.returncode:
        said = [line for line in ended.stderr.splitlines() if " ERROR " in line or "Error: " in line]
        return name, False, took, said[0][:200] if said else f"exit code {ended.returncode}"
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["training/rollout_logprob_gap_max"] for row in rows if "training/rollout_logprob_gap_max" in row]
    return name, True, took, f"largest mismatch {max(gaps):.1e}"


def main(names: list[str]) -> int:
    """The exit code: how many did not end well."""
    unknown = [name for name in names if name not in RUNS]
    if unknown:
        sys.exit(f"there is no run {unknown[0]!r}; use one of {'; '.join(RUNS)}")
    folder, failed = Path(tempfile.mkdtemp(prefix="gpu_runs_")), 0
    write_tasks(folder)
    for family in dict.fromkeys(RUNS[name][0] for name in names or RUNS):
        write_model(folder / family, family)
    print(f"logs in {folder}", flush=True)
    with ThreadPoolExecutor(AT_ONCE if torch.cuda.is_available() and not names else 1) as pool:
        for name, passed, seconds, said in pool.map(lambda name: run(name, folder), names or RUNS):
            failed += not passed
            print(f"{'ok  ' if passed else 'FAIL'}  {name}, {seconds:.0f} s: {said}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
