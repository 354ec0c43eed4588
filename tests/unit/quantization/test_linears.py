"""The quantised copies of a whole model: which layers, when they are used, when they are made anew."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

from megatron_rl.errors import QuantizationError
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.device import restore
from megatron_rl.quantization.audit import AUDITED_TOKENS, observe_linears
from megatron_rl.quantization.linears import QuantizedLinears, parallel_linears
from megatron_rl.quantization.recipe import QuantizedWeight
from megatron_rl.quantization.shapes import skipped
from megatron_rl.registry import RECIPES
from tests.support.quantized import INT4, LINEARS, QUANTIZING, disturb, held_bytes, linears_of, quantizable_policy

pytestmark = pytest.mark.usefixtures("one_rank")
TOKENS = torch.arange(24)[None] % 32


@pytest.fixture
def policy() -> PolicyModel:
    return quantizable_policy()


def logits(policy: PolicyModel) -> torch.Tensor:
    positions = torch.arange(24)[None]
    mask = torch.ones(1, 1, 24, 24, dtype=torch.bool).triu(1)
    with torch.no_grad():
        return policy.gpt(TOKENS, positions, mask)


def diverted(policy: PolicyModel) -> list[str]:
    """Linears whose forward is not their own."""
    return [name for name, module in parallel_linears(policy.gpt).items() if "forward" in module.__dict__]


def _living_bytes() -> int:
    storages = {
        storage.data_ptr(): storage.nbytes()
        for one in gc.get_objects()
        # The two that have memory; what a trace leaves behind has none.
        if type(one) in (torch.Tensor, torch.nn.Parameter) and one.device.type == "cpu"
        for storage in (one.untyped_storage(),)
    }
    return sum(storages.values())


def counted(linears: QuantizedLinears, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one element at every refresh."""
    refresh, calls = linears.refresh, []

    def counting() -> None:
        calls.append(1)
        refresh()

    monkeypatch.setattr(linears, "refresh", counting)
    return calls


class TestWhichLayers:
    def test_all_of_the_decoder_and_nothing_else(self, policy: PolicyModel) -> None:
        assert tuple(sorted(parallel_linears(policy.gpt))) == tuple(sorted(LINEARS))
        assert isinstance(policy.gpt.output_layer, ColumnParallelLinear)  # and yet it is not among them

    @pytest.mark.parametrize(
        ("patterns", "left"),
        [
            (["layers.0.*"], LINEARS[:4]),
            (["*.linear_fc2"], [name for name in LINEARS if name.endswith("linear_fc2")]),
            (["first:1"], LINEARS[:4]),
            (["last:1"], LINEARS[4:]),
            (["first:2"], LINEARS),
            (["layers.1.mlp.*", "*.linear_qkv"], [*LINEARS[1:2], *LINEARS[5:]]),
            ([], []),
        ],
    )
    def test_patterns_leave_layers_as_they_are(self, policy: PolicyModel, patterns: list[str], left: list[str]) -> None:
        linears = linears_of(policy, skip=patterns)
        assert sorted(linears.plain) == sorted(left)
        assert sorted(layer.name for layer in linears.layers) == sorted(set(LINEARS) - set(left))
        with linears.installed():
            assert sorted(diverted(policy)) == sorted(set(LINEARS) - set(left))

    def test_the_edges_of_a_deep_model(self) -> None:
        names = [f"layers.{index}.mlp.linear_fc1" for index in range(12)]
        assert [n for n in names if skipped(n, ["last:2"], 12)] == names[10:]
        assert [n for n in names if skipped(n, ["first:2"], 12)] == names[:2]
        assert [n for n in names if skipped(n, ["layers.1.*"], 12)] == names[1:2], "layers 10 and 11 too"

    def test_patterns_that_name_nothing(self) -> None:
        patterns = ["layers.2.*", "first:0", "*.linear_fc1", "linear_fc1", "first:1"]
        unmatched = [p for p in patterns if not any(skipped(name, [p], 2) for name in LINEARS)]
        assert unmatched == ["layers.2.*", "first:0", "linear_fc1"]

    def test_bytes_and_numbers(self, policy: PolicyModel) -> None:
        linears = linears_of(policy, "int8_smooth", skip=["first:1"])
        shapes = [parallel_linears(policy.gpt)[name].weight.shape for name in LINEARS[4:]]
        assert linears.num_weights == sum(rows * columns for rows, columns in shapes)
        assert linears.stored_bytes == sum(RECIPES.get("int8_smooth").stored_bytes(*shape) for shape in shapes)


class TestSwitching:
    def test_inside_the_model_is_the_quantised_one(self, policy: PolicyModel) -> None:
        linears, plain = linears_of(policy), logits(policy)
        with linears.installed():
            assert sorted(diverted(policy)) == sorted(LINEARS)
            quantised = logits(policy)
        assert diverted(policy) == []
        assert torch.equal(logits(policy), plain)
        assert 1e-4 < (quantised - plain).abs().mean() < 1.0
        assert {layer.calls for layer in linears.layers} == {1}

    def test_weight_only_quantisation_is_a_model_of_rounded_weights(self, policy: PolicyModel) -> None:
        linears = linears_of(policy, INT4)
        with linears.installed():
            quantised = logits(policy)
        with torch.no_grad():
            for layer in linears.layers:
                layer.module.weight.copy_(linears.recipe.dequantize(layer.weight))
        assert torch.allclose(logits(policy), quantised, atol=1e-5)

    def test_it_nests(self, policy: PolicyModel) -> None:
        linears = linears_of(policy)
        with linears.installed():
            with linears.installed():
                assert len(diverted(policy)) == 8
            assert len(diverted(policy)) == 8, "the inner block took the copies away"
        assert diverted(policy) == []

    def test_an_error_inside_restores_the_layers(self, policy: PolicyModel) -> None:
        linears = linears_of(policy)
        with pytest.raises(KeyError), linears.installed():
            raise KeyError
        assert diverted(policy) == []
        with pytest.raises(KeyError), linears.installed(), linears.suspended():
            raise KeyError
        assert diverted(policy) == []

    def test_suspended_inside_installed(self, policy: PolicyModel) -> None:
        linears, plain = linears_of(policy), logits(policy)
        with linears.installed():
            quantised = logits(policy)
            with linears.suspended():
                assert diverted(policy) == []
                assert torch.equal(logits(policy), plain)
                with linears.suspended():
                    assert diverted(policy) == []
                assert diverted(policy) == []
                with linears.installed():
                    assert torch.equal(logits(policy), quantised)
                assert diverted(policy) == []
            assert torch.equal(logits(policy), quantised)
        assert diverted(policy) == []

    def test_suspended_with_nothing_installed(self, policy: PolicyModel) -> None:
        linears = linears_of(policy)
        with linears.suspended():
            assert diverted(policy) == []
        assert diverted(policy) == []

    def test_a_checkpoint_made_inside_has_the_usual_keys(self, policy: PolicyModel) -> None:
        plain = policy.gpt.state_dict()
        sharded, parameters = sorted(policy.gpt.sharded_state_dict()), list(dict(policy.gpt.named_parameters()))
        linears = linears_of(policy, "int8_smooth")
        with linears.installed():
            inside = policy.gpt.state_dict()
            assert list(inside) == list(plain)
            assert sorted(policy.gpt.sharded_state_dict()) == sharded
            assert list(dict(policy.gpt.named_parameters())) == parameters
            assert list(dict(policy.gpt.named_buffers())) == [n for n, _ in policy.gpt.named_buffers()]
        for key, value in plain.items():
            if isinstance(value, torch.Tensor):
                assert inside[key].data_ptr() == value.data_ptr(), f"{key} is another tensor"

    def test_embedding_head_and_norms_run_as_they_are(self, policy: PolicyModel) -> None:
        linears, seen = linears_of(policy, INT4), {}
        watched = {
            "embedding": policy.gpt.embedding,
            "head": policy.gpt.output_layer,
            "norm": policy.gpt.decoder.final_layernorm,
        }
        handles = [
            module.register_forward_hook(lambda _, args, output, name=name: seen.__setitem__(name, (args, output)))
            for name, module in watched.items()
        ]
        with linears.installed():
            logits(policy)
        for handle in handles:
            handle.remove()
        hidden, head = seen["head"][0][0], seen["head"][1][0]
        assert torch.allclose(head, hidden @ policy.gpt.output_layer.weight.t(), atol=1e-6)
        assert torch.equal(seen["norm"][1], hidden)
        words = policy.gpt.embedding.word_embeddings.weight[TOKENS[0]]
        assert torch.equal(seen["embedding"][1][:, 0], words)
        assert all("forward" not in module.__dict__ for module in watched.values())


class TestFreshness:
    def test_copies_are_made_when_first_used_and_not_again(
        self, policy: PolicyModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        linears = linears_of(policy)
        refreshes = counted(linears, monkeypatch)
        for _ in range(3):
            with linears.installed(), linears.installed():
                logits(policy)
        assert len(refreshes) == 1
        linears.weights_changed()
        assert len(refreshes) == 1, "a refresh that nobody may need"
        with linears.installed():
            pass
        assert len(refreshes) == 2

    @pytest.mark.parametrize("recipe", QUANTIZING)
    def test_a_changed_model_is_used_once_it_is_announced(self, policy: PolicyModel, recipe: str) -> None:
        linears = linears_of(policy, recipe)
        with linears.installed():
            before = logits(policy)
        disturb(policy, 0.2)
        with linears.installed():
            stale = [linears.recipe.dequantize(layer.weight) for layer in linears.layers]
        linears.weights_changed()
        with linears.installed():
            after = logits(policy)
            fresh = [linears.recipe.dequantize(layer.weight) for layer in linears.layers]
        with linears_of(policy, recipe).installed():
            assert torch.equal(after, logits(policy)), "other numbers than copies made from scratch"
        assert not torch.equal(after, before)
        assert not any(torch.equal(old, new) for old, new in zip(stale, fresh, strict=True))

    @pytest.mark.parametrize("recipe", QUANTIZING)
    def test_padding_is_zero_again_in_memory_that_others_had_meanwhile(
        self, recipe: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        linears = linears_of(quantizable_policy(ffn_hidden_size=40), recipe)
        linears.refresh()
        linears.release()
        monkeypatch.setattr("megatron_rl.platform.device.restore", lambda *given: restore(*given).fill_(1))
        linears.refresh()
        padding = 0
        for q in (layer.weight for layer in linears.layers):
            codes = q.codes.float()
            padding += codes.numel() - q.rows * q.columns
            assert codes[q.rows :].count_nonzero() + codes[:, q.columns :].count_nonzero() == 0
        assert padding > 0

    def test_scales_stay_where_they_lie_in_the_operand(self, policy: PolicyModel) -> None:
        """As those of fp8_block on CUDA: a check compares them while the codes are away."""

        class Joined(type(RECIPES.get("fp8"))):
            def allocate(self, shape: Sequence[int], device: torch.device) -> QuantizedWeight:
                q = super().allocate(shape, device)
                q.operand = torch.ones(len(q.scales), 4)
                q.scales = q.operand[:, :1]
                return q

        linears = QuantizedLinears(policy.gpt, Joined())
        codes = sum(layer.weight.codes.nbytes for layer in linears.layers)
        held = held_bytes(linears)
        linears.release()
        assert all(layer.weight.scales.untyped_storage().nbytes() for layer in linears.layers)
        assert held - held_bytes(linears) == codes

    @pytest.mark.parametrize("recipe", QUANTIZING)
    def test_refreshes_take_no_memory_and_move_nothing(self, policy: PolicyModel, recipe: str) -> None:
        linears = linears_of(policy, recipe)
        linears.refresh()
        addresses = [tensor.data_ptr() for layer in linears.layers for tensor in layer.weight.tensors]
        gc.collect()
        living = _living_bytes()
        for _ in range(4):
            linears.weights_changed()
            with linears.installed():
                pass
        gc.collect()
        assert _living_bytes() <= living
        assert [tensor.data_ptr() for layer in linears.layers for tensor in layer.weight.tensors] == addresses

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    @pytest.mark.parametrize("recipe", QUANTIZING)
    def test_a_weight_that_is_not_finite_is_named(self, policy: PolicyModel, recipe: str, bad: float) -> None:
        linears = linears_of(policy, recipe)
        with torch.no_grad():
            parallel_linears(policy.gpt)["layers.1.mlp.linear_fc2"].weight[3, 5] = bad
        with pytest.raises(QuantizationError, match=r"the weight of layers\.1\.mlp\.linear_fc2 holds NaN or infinity"):
            linears.refresh()
        with pytest.raises(QuantizationError), linears.installed():
            pytest.fail("a rollout of noise")
        assert diverted(policy) == []
        with torch.no_grad():
            parallel_linears(policy.gpt)["layers.1.mlp.linear_fc2"].weight[3, 5] = 0.1
        with linears.installed():
            assert logits(policy).isfinite().all()

    @pytest.mark.parametrize("recipe", QUANTIZING)
    @pytest.mark.parametrize("given_up", [False, True])
    def test_renewing_names_the_copies_of_other_weights(self, policy: PolicyModel, recipe: str, given_up: bool) -> None:
        linears = QuantizedLinears(policy.gpt, RECIPES.get(recipe))
        assert linears.refresh_changed() == [], "there was nothing to compare"
        changed = linears.layers[2]
        for factor, names in ((1.0, []), (3.0, [changed.name])):
            changed.parameter.data.mul_(factor)
            if given_up:
                linears.release()
            assert linears.refresh_changed() == names
        linears.weights_changed()
        changed.parameter.data.mul_(3.0)
        assert linears.refresh_changed() == [], "the change was announced"


class TestCalibration:
    def test_factors_follow_activations_and_weights(self, policy: PolicyModel) -> None:
        linears = linears_of(policy, "int8_smooth")
        first, *others = linears.layers
        largest = first.module.weight.detach().abs().amax(0)
        linears.calibrate({first.name: 4 * largest, others[0].name: None})
        assert torch.allclose(first.weight.smoothing, torch.full_like(largest, 2.0))
        for layer in others:
            assert torch.equal(layer.weight.smoothing, torch.ones(layer.weight.columns)), layer.name

    def test_the_copies_are_made_anew_after_it(self, policy: PolicyModel, monkeypatch: pytest.MonkeyPatch) -> None:
        linears = linears_of(policy, "int8_smooth")
        linears.refresh()
        refreshes = counted(linears, monkeypatch)
        linears.calibrate({})
        with linears.installed():
            pass
        assert len(refreshes) == 1

    def test_observed_channels_are_the_largest_over_all_calls(self, policy: PolicyModel) -> None:
        layer = parallel_linears(policy.gpt)["layers.0.mlp.linear_fc1"]
        with observe_linears(policy.gpt, channels=True) as seen, torch.no_grad():
            for x in (torch.full((3, 1, 32), 2.0), torch.full((5, 1, 32), -7.0), torch.zeros(70, 1, 32)):
                layer(x)
        one = seen["layers.0.mlp.linear_fc1"]
        assert one.calls == 3
        assert one.channel_amax.tolist() == [7.0] * 32
        assert one.inputs.shape == (AUDITED_TOKENS, 32)
        assert one.inputs.abs().max() == 0, "not those of the call with the most tokens"
        assert seen["layers.1.mlp.linear_fc1"].calls == 0
        layer(torch.zeros(1, 1, 32))
        assert one.calls == 3, "still watched"
