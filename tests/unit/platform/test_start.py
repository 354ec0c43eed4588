"""What a process imports before its first rollout; each of these takes a second or more of every start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.tiny import write_tokenizer

LEFT_OUT = ("torch._dynamo", "torch._inductor", "wandb", "datasets", "pandas", "pyarrow", "torch.utils.tensorboard")
UNUSED = ("megatron_rl.rollout.harnesses", "megatron_rl.endpoint.server", "megatron_rl.environments.mcp.client")
"""What needs the endpoint of harnesses, or a server of tools."""
PROGRAM = """
import json, sys
from megatron_rl.platform import prepare
import torch
import megatron_rl.loop
from megatron_rl.tokenizer import load_tokenizer

load_tokenizer(sys.argv[1])
for kind in (torch.optim.AdamW, torch.optim.SGD):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = kind([weight], lr=0.5, weight_decay=0.0)
    weight.grad = torch.full((3,), 2.0)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    assert weight.grad is None and weight.requires_grad
    print(json.dumps(weight.tolist()))
print(json.dumps(sorted(sys.modules)))
"""


def test_the_loop_a_tokenizer_and_an_optimizer_import_no_more_than_they_use(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    ended = subprocess.run([sys.executable, "-c", PROGRAM, directory], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    adam, sgd, modules = map(json.loads, ended.stdout.splitlines()[-3:])
    assert all(abs(value - 0.5) < 1e-6 for value in adam)  # 1 - lr * sign
    assert sgd == [0.0, 0.0, 0.0]  # 1 - lr * gradient
    assert not {*LEFT_OUT, *UNUSED} & set(modules)
