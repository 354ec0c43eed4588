"""The audit believes numbers: a layer that ran in another format than its own is named."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from megatron_rl.errors import QuantizationError
from megatron_rl.models.gpt import PolicyModel, rollout_mode
from megatron_rl.quantization.audit import (
    FULL_PRECISION,
    LayerAudit,
    audit,
    observe_linears,
    refuse_other_formats,
    table_rows,
)
from megatron_rl.quantization.copies import QuantizedLinear
from megatron_rl.quantization.linears import QuantizedLinears, parallel_linears
from megatron_rl.registry import RECIPES
from tests.support.generation import generate, rollout_engine
from tests.support.quantized import (
    INT4,
    LINEARS,
    QUANTIZING,
    calibrated_rollout,
    complete,
    disturb,
    linears_of,
    quantizable_policy,
    rollout_quantization,
    short_requests,
)

pytestmark = pytest.mark.usefixtures("one_rank")
BROKEN = "layers.1.mlp.linear_fc1"
LOWEST = {"int8": 1e-3, "fp8": 1e-2}
"""Relative error of any layer, by the first word of the format."""


@pytest.fixture
def policy() -> PolicyModel:
    return quantizable_policy()


@pytest.fixture(autouse=True)
def tolerant_removal(monkeypatch: pytest.MonkeyPatch) -> None:
    """`remove` may find nothing: some tests have taken the copy away themselves."""
    monkeypatch.setattr(QuantizedLinear, "remove", lambda self: self.module.__dict__.pop("forward", None))


def audited(
    policy: PolicyModel, linears: QuantizedLinears, spoil: Callable[[], None] = lambda: None
) -> dict[str, LayerAudit]:
    """The audit of a rollout during which ``spoil`` has done something to the model."""
    engine = rollout_engine(policy)
    with linears.installed(), observe_linears(policy.gpt, channels=False) as seen:
        spoil()
        generate(policy, engine, short_requests())
    return {row.layer: row for row in audit(policy.gpt, linears, seen)}


def layer_of(linears: QuantizedLinears, name: str = BROKEN) -> QuantizedLinear:
    return next(layer for layer in linears.layers if layer.name == name)


def refused(rows: dict[str, LayerAudit], name: str) -> str:
    """The message; the layer it names must be the only one."""
    assert [row.layer for row in rows.values() if not row.agrees] == [name]
    with pytest.raises(QuantizationError, match=f"1 of 8 linear layers .* {re.escape(name)}") as error:
        refuse_other_formats(list(rows.values()))
    return str(error.value)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("recipe", QUANTIZING)
def test_a_right_rollout_passes(recipe: str, dtype: str) -> None:
    policy = quantizable_policy(bf16=dtype == "bf16")
    linears = linears_of(policy, recipe, skip=["*.linear_proj"])
    rows = audited(policy, linears)
    refuse_other_formats(list(rows.values()))
    assert sorted(rows) == sorted(LINEARS)
    lowest = LOWEST[linears.recipe.format.split()[0].rstrip(",")]
    for name, row in rows.items():
        is_plain = name.endswith("linear_proj")
        assert row.wanted == row.ran == (FULL_PRECISION if is_plain else linears.recipe.format)
        assert row.calls > 0
        if is_plain:
            assert row.relative_error < (1e-5 if dtype == "fp32" else 1e-2)
        else:
            assert lowest < row.relative_error < 0.3


def test_a_layer_that_silently_ran_plain_is_named(policy: PolicyModel) -> None:
    linears = linears_of(policy)
    message = refused(audited(policy, linears, lambda: layer_of(linears).remove()), BROKEN)
    assert "should have run as 'int8, channel x token' and ran as 'full precision'" in message
    assert "--rl-rollout-quantization none" in message


@pytest.mark.parametrize(("wanted", "other"), [("int8", "fp8"), ("fp8", "int8"), ("fp8", INT4), ("int8", INT4)])
def test_a_layer_that_ran_another_recipe_is_named(policy: PolicyModel, wanted: str, other: str) -> None:
    linears = linears_of(policy, wanted)
    module = parallel_linears(policy.gpt)[BROKEN]
    recipe = RECIPES.get(other)
    q = recipe.quantize(module.weight.detach())

    def spoil() -> None:
        module.forward = lambda x, *_, **__: (recipe.matmul(x, q), None)

    rows = audited(policy, linears, spoil)
    assert rows[BROKEN].ran == "neither the plain nor the quantised product"
    refused(rows, BROKEN)


def test_a_skipped_layer_that_ran_quantised_is_named(policy: PolicyModel) -> None:
    linears, others = linears_of(policy, skip=[BROKEN]), linears_of(policy)
    others.refresh()
    rows = audited(policy, linears, lambda: layer_of(others).install())
    layer_of(others).remove()
    assert "should have run as 'full precision'" in refused(rows, BROKEN)


def test_a_layer_that_ran_on_a_copy_of_other_weights_is_named(policy: PolicyModel) -> None:
    linears = linears_of(policy)
    module, recipe = layer_of(linears).module, linears.recipe
    stale = recipe.quantize(0.5 * module.weight.detach())

    def spoil() -> None:
        module.forward = lambda x, *_, **__: (recipe.matmul(x, stale), None)

    rows = audited(policy, linears, spoil)
    assert rows[BROKEN].ran == "neither the plain nor the quantised product"
    refused(rows, BROKEN)


def test_layers_that_were_never_called_are_refused(policy: PolicyModel) -> None:
    linears = linears_of(policy)
    called = parallel_linears(policy.gpt)[BROKEN]
    with linears.installed(), observe_linears(policy.gpt, channels=False) as seen, torch.no_grad():
        called(torch.ones(4, 1, called.weight.shape[1]))
    rows = audit(policy.gpt, linears, seen)
    assert [row.ran == "not at all" for row in rows] == [row.layer != BROKEN for row in rows]
    with pytest.raises(QuantizationError, match=r"7 of 8 linear layers .* ran as 'not at all'"):
        refuse_other_formats(rows)


class TestInARun:
    """`RolloutQuantization`: calibrates, audits once a recipe, hands out fresh copies."""

    def test_it_audits_the_first_rollout_only(self, policy: PolicyModel) -> None:
        audits: list[Sequence[LayerAudit]] = []
        quantization, engine = rollout_quantization(policy, "int8", audits), rollout_engine(policy)
        for _ in range(3):
            complete(policy, engine, quantization, short_requests())
        assert [len(rows) for rows in audits] == [8]
        quantization.fall_back()
        complete(policy, engine, quantization, short_requests())
        assert {row.ran for row in audits[1]} == {"int8, channel x token, smoothed"}

    def test_a_rollout_without_tokens_is_no_audit(self, policy: PolicyModel) -> None:
        audits: list[Sequence[LayerAudit]] = []
        quantization = rollout_quantization(policy, "int8", audits)
        with quantization.rollout():
            pass
        assert audits == []
        complete(policy, rollout_engine(policy), quantization, short_requests())
        assert len(audits) == 1

    def test_a_wrong_format_ends_the_rollout(self, policy: PolicyModel) -> None:
        audits: list[Sequence[LayerAudit]] = []
        quantization, engine = rollout_quantization(policy, "int8", audits), rollout_engine(policy)
        with pytest.raises(QuantizationError, match=BROKEN), quantization.rollout():
            layer_of(quantization.linears).remove()
            generate(policy, engine, short_requests())
        assert len(audits) == 1, "the table helps to see why"

    def test_a_plain_phase_is_plain_even_where_copies_are_installed_for_good(self, policy: PolicyModel) -> None:
        quantization = rollout_quantization(policy, "int8", [])
        module = quantization.linears.layers[0].module
        with quantization.linears.installed():  # as aligned training does
            with quantization.linears.suspended():
                assert "forward" not in vars(module)
            assert "forward" in vars(module)

    def test_only_recipes_that_want_it_are_calibrated_and_once(self, policy: PolicyModel) -> None:
        for recipe, wanted in (("int8", 0), ("int8_smooth", 1)):
            quantization, engine, calls = rollout_quantization(policy, recipe), rollout_engine(policy), []

            def calibrate(engine=engine, calls=calls) -> None:
                calls.append([name for name, m in parallel_linears(policy.gpt).items() if "forward" in m.__dict__])
                generate(policy, engine, short_requests(2))

            for _ in range(2):
                with rollout_mode(policy), calibrated_rollout(quantization, calibrate):
                    pass
            assert calls == [[]] * wanted, f"{recipe}: calibrated too often, or on quantised activations"
            if wanted:
                smoothing = [layer.weight.smoothing for layer in quantization.linears.layers]
                assert all((factors != 1).any() for factors in smoothing)

    def test_a_recipe_of_another_file_goes_on_after_a_restart(self, policy: PolicyModel, tmp_path: Path) -> None:
        (tmp_path / "mine.py").write_text(
            "from megatron_rl.quantization.recipes.int8 import Int8\n"
            "class Mine(Int8):\n    name, format, safer = 'mine', 'int8, mine', 'int8'\n"
            "RECIPE = Mine()\n"
        )
        named = f"{tmp_path}/mine.py:RECIPE"
        first, resumed = rollout_quantization(policy, named), rollout_quantization(policy, named)
        resumed.load_state_dict(first.state_dict())
        assert first.recipe == resumed.recipe == named
        assert resumed.linears.recipe.format == "int8, mine"
        assert resumed.fall_back() == resumed.recipe == "int8"

    def test_the_safer_recipes_one_after_the_other(self, policy: PolicyModel) -> None:
        quantization = rollout_quantization(policy, "int8", skip=["first:1"])
        used = [quantization.recipe]
        while (safer := quantization.fall_back()) is not None:
            assert quantization.recipe == safer
            if safer != "none":
                assert len(quantization.linears.plain) == 4, "the skipped layers were forgotten"
            used.append(safer)
        assert used == ["int8", "int8_smooth", "none"]
        assert quantization.linears.stored_bytes == 0
        engine = rollout_engine(policy)
        requests = short_requests()
        assert complete(policy, engine, quantization, requests) == generate(policy, engine, requests)

    @pytest.mark.parametrize("recipe", QUANTIZING)
    def test_changed_weights_are_used(self, policy: PolicyModel, recipe: str) -> None:
        quantization, engine, requests = rollout_quantization(policy, recipe), rollout_engine(policy), short_requests()
        before = complete(policy, engine, quantization, requests)
        disturb(policy, 0.5)
        quantization.weights_changed()
        after = complete(policy, engine, quantization, requests)
        assert after != before


def test_long_tables_show_the_largest_errors() -> None:
    rows = [LayerAudit(f"layers.{i}.x", "a", "a", error, 1) for i, error in enumerate([0.1, 0.3, 0.2])]
    assert table_rows(rows, 3) == [("layers.0.x", "a", "10.00%"), ("layers.1.x", "a", "30.00%"),
                                   ("layers.2.x", "a", "20.00%")]  # fmt: skip
    assert [row[0] for row in table_rows(rows, 2)] == ["layers.1.x", "layers.2.x"]
