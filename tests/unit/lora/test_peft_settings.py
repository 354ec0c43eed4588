"""Which settings of peft's `LoraConfig` are read as W + s B A, and which are refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

from megatron_rl.errors import ConfigError
from megatron_rl.families import peft
from tests.support.hugging_face import batch_of, reference_logits, write_model
from tests.support.tiny import VOCABULARY
from tests.unit.lora.test_files import SIZES

FIELDS = {field.name for field in dataclasses.fields(LoraConfig)}
# Of these any value is read: they say which base, what the tensors show anyway, or what only training depends on.
FREE = {
    "lora_dropout", "target_modules", "exclude_modules", "rank_pattern", "task_type", "auto_mapping", "peft_version",
    "base_model_name_or_path", "revision", "inference_mode", "megatron_core", "qalora_group_size", "runtime_config",
    "eva_config",
}  # fmt: skip
READ = {"r": 4, "lora_alpha": 3.5, "use_rslora": True}
CHANGES: list[tuple[str, Any]] = [
    ("init_lora_weights", "pissa"), ("init_lora_weights", "pissa_niter_16"), ("init_lora_weights", "olora"),
    ("init_lora_weights", "corda"), ("init_lora_weights", "loftq"), ("init_lora_weights", "lora_ga"),
    ("init_lora_weights", "mica"), ("init_lora_weights", ["gaussian"]), ("init_lora_weights", {}),
    ("alora_invocation_tokens", [5, 1]), ("alora_invocation_tokens", []), ("arrow_config", {"top_k": 2}),
    ("kasa_config", {}), ("velora_config", {}), ("monteclora_config", {}), ("use_bdlora", {}), ("use_qalora", True),
    ("use_dora", True), ("lora_bias", True), ("bias", "all"), ("bias", "lora_only"), ("fan_in_fan_out", True),
    ("modules_to_save", ["lm_head"]), ("alpha_pattern", {"q_proj": 3}), ("layers_to_transform", 0),
    ("layer_replication", [[0, 2], [1, 2]]), ("trainable_token_indices", [3]), ("target_parameters", ["w"]),
    ("peft_type", "LOHA"), ("megatron_config", {"a": 1}), ("loftq_config", {"loftq_bits": 4}),
    ("a_setting_of_next_year", {}),
]  # fmt: skip


@pytest.fixture
def adapter(tmp_path: Path):
    """Writes an adapter of two tensors with these changes to a config.json of `peft`'s own."""
    LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], lora_alpha=16).save_pretrained(tmp_path)
    written = json.loads((tmp_path / peft.CONFIG_FILE).read_text())
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    save_file({name.format(part): torch.zeros(8, 8) for part in "AB"}, tmp_path / peft.WEIGHTS_FILE)

    def write(**changes: Any) -> Path:
        (tmp_path / peft.CONFIG_FILE).write_text(json.dumps(written | changes))
        return tmp_path

    return write


def test_every_default_of_peft_is_read(adapter) -> None:
    written = json.loads((adapter() / peft.CONFIG_FILE).read_text())
    assert written.keys() >= FIELDS - {"runtime_config"}
    assert peft.settings_of(adapter()) == {"lora_rank": 8, "lora_alpha": 16.0, "lora_targets": ("q_proj",)}
    for value in (True, False, "gaussian", "eva", "orthogonal"):
        peft.settings_of(adapter(init_lora_weights=value, eva_config={"rho": 2.0} if value == "eva" else None))


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_any_other_value_of_a_field_is_refused_by_its_name_unless_it_changes_nothing(adapter, field: str) -> None:
    """A field of a later version of peft is refused too, until somebody has looked at it."""
    directory = adapter(**{field: READ.get(field, {"another": 1} if field != "bias" else "all")})
    if field in READ or field in FREE:
        peft.settings_of(directory)
        return
    with pytest.raises(ConfigError, match=rf"{field} .* is not built, only plain LoRA") as raised:
        peft.settings_of(directory)
    assert len(raised.value.lines) == 1


@pytest.mark.parametrize(("field", "value"), CHANGES, ids=str)
def test_what_is_not_plain_lora_is_refused_by_name(adapter, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{field} .* is not built, only plain LoRA"):
        peft.settings_of(adapter(**{field: value}))


@pytest.mark.parametrize(
    "changes",
    [{"r": 0}, {"r": -1}, {"r": True}, {"r": 2.5}, {"r": "8"}, {"lora_alpha": 0}, {"lora_alpha": float("nan")},
     {"lora_alpha": float("inf")}, {"lora_alpha": 10**400}, {"use_rslora": True, "rank_pattern": {"q_proj": 4}}],
    ids=str,
)  # fmt: skip
def test_a_scale_that_is_none_is_one_line(adapter, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        peft.settings_of(adapter(**changes))
    assert len(raised.value.lines) == 1


@pytest.mark.parametrize("way", ["pissa", "olora", "orthogonal", "gaussian"])
def test_peft_itself_changes_the_base_of_what_is_refused(tmp_path: Path, way: str) -> None:
    """As saved, with no step of training: read as plain LoRA it would be nats away from peft's model."""
    base = write_model(tmp_path / "base", "llama", SIZES)
    batch = batch_of(VOCABULARY, (20, 12))
    plain = reference_logits(base, batch)
    theirs = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=way))
    theirs.save_pretrained(tmp_path / "adapter")
    weight = theirs.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight.detach().clone()
    kept = torch.equal(weight, write_model(tmp_path / "again", "llama", SIZES).model.layers[0].self_attn.q_proj.weight)
    torch.testing.assert_close(reference_logits(theirs.eval(), batch), plain, rtol=0, atol=1e-3)
    if kept:
        peft.settings_of(tmp_path / "adapter")
    else:
        with pytest.raises(ConfigError, match=f"init_lora_weights '{way}' is not built"):
            peft.settings_of(tmp_path / "adapter")
    assert kept == (way in ("orthogonal", "gaussian"))
