"""Quantisation of rollouts over a run: recipe, refresh, calibration, audit and fallback.

    from the flags ─► calibrate (int8_smooth) ─► rollouts ─► audit, once ─► rollouts ─► ...
                          ▲                                                      │
                          └── the next safer recipe ◄── the parity gate ◄────────┘
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.platform.device import OffloadableFactory, OffloadableTensors
from megatron_rl.quantization.audit import LayerAudit, audit, gather_audits, observe_linears, refuse_other_formats
from megatron_rl.quantization.linears import QuantizedLinears
from megatron_rl.registry import RECIPES

logger = logging.getLogger(__name__)

_SMOOTHING = "smoothing."


class RolloutQuantization:
    """Owns the quantised copies; without a recipe there are none, and all calls are optional."""

    def __init__(
        self, model: torch.nn.Module, recipe: str, skip: Sequence[str],
        on_audit: Callable[[Sequence[LayerAudit]], None],
        timed: Callable[[str], AbstractContextManager[None]] = contextlib.nullcontext,
        lockstep_group: dist.ProcessGroup | None = None, *, quantizes_gradients: bool = False,
        offloadable: OffloadableFactory = OffloadableTensors,
    ) -> None:  # fmt: skip
        """``on_audit`` receives the first rollout's table; ``timed`` opens a timer phase. See `QuantizedLinears`."""
        self.offloadable = offloadable
        """Makes buffers that captured graphs read releasable."""
        self._model, self._requested, self._skip, self._lockstep_group = model, recipe, tuple(skip), lockstep_group
        self._on_audit, self._timed, self._quantizes_gradients = on_audit, timed, quantizes_gradients
        self._aligned = False
        self.stale: tuple[str, ...] = ()
        """Layers whose copies were outdated at the last `emulated`; equal on a replica's ranks."""
        self._use(recipe)

    def _use(self, name: str) -> None:
        recipe = RECIPES.get(name)
        if "linears" in vars(self):  # the old buffers go before the new ones are made
            vars(self).pop("linears").release()
        self.linears = QuantizedLinears(
            self._model, recipe, self._skip, self._lockstep_group, quantizes_gradients=self._quantizes_gradients,
            offloadable=self.offloadable,
        )  # fmt: skip
        self.is_quantized = recipe is not None
        """False without a recipe."""
        self.recipe = name if ":" in name or recipe is None else recipe.name
        """Name or path of the current recipe."""
        self.wants_calibration = recipe is not None and recipe.needs_calibration
        """Whether the engine must run a few prompts before the next `rollout`."""
        self._audited = False

    def weights_changed(self) -> None:
        """Mark the copies as outdated: refreshed now in aligned training (collective over lockstep ranks), else on use.
        """
        self.linears.weights_changed()
        if self._aligned:
            self.linears.refresh()

    def release(self) -> None:
        """Free the copies until they are used again, except in aligned training."""
        if not self._aligned:
            self.linears.release()

    @contextlib.contextmanager
    def aligned(self) -> Iterator[None]:
        """Run the trainer's linears quantised too, inside the context; weights must be loaded."""
        with self.linears.installed():
            self._aligned = True
            try:
                yield
            finally:
                self._aligned = False

    @contextlib.contextmanager
    def calibrating(self) -> Iterator[None]:
        """Run the linears unquantised and calibrate their copies by the observed activations, inside the context."""
        linears = self.linears
        with observe_linears(self._model, channels=True) as seen, linears.suspended():
            yield
        linears.calibrate({name: one.channel_amax for name, one in seen.items()})
        self.wants_calibration = False

    @contextlib.contextmanager
    def rollout(self) -> Iterator[None]:
        """Run the linears quantised inside the context, on fresh copies; audit the first time. Collective.

        Raises:
            QuantizationError: a weight is not finite, or a layer ran in another format.
        """
        linears = self.linears
        if not self.is_quantized:
            yield
            return
        with self._timed("gen/requantize"):
            linears.update()
        with linears.installed():
            if self._audited:
                yield
                return
            with observe_linears(self._model, channels=False) as seen:
                yield
        rows = gather_audits(audit(self._model, linears, seen), self._lockstep_group)
        if any(row.calls for row in rows):
            self._audited = True
            self._on_audit(rows)
            refuse_other_formats(rows)

    @contextlib.contextmanager
    def emulated(self) -> Iterator[None]:
        """Run the trainer's forward pass on freshly quantised weights inside the context, as in a rollout; collective.

        Sets `stale` to the layers whose copies were outdated.
        """
        self.stale = tuple(self.linears.refresh_changed())
        with self.linears.installed():
            yield

    def fall_back(self) -> str | None:
        """Switch to the next safer recipe; return its name, None if there is none."""
        if not self.is_quantized:
            return None
        self._use(self.linears.recipe.safer)
        return self.recipe

    def state_dict(self) -> dict[str, Any]:
        """Return the recipe of the flags, the current one, and its calibration on this rank, [K] fp32 per layer."""
        return {"asked": self._requested, "recipe": self.recipe, **({} if self.wants_calibration else self._smoothing)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore recipe and calibration of a checkpoint, so that a resumed run rounds like the interrupted one.

        Ignored if the flags now ask for another recipe. A calibration of other layers or shapes (another parallel
        layout) is repeated.
        """
        if state["asked"] != self._requested:
            return
        if state["recipe"] != self.recipe:
            logger.warning("rollouts go on with %s instead of %s, as before the restart", state["recipe"], self.recipe)
            self._use(state["recipe"])
        if not self.wants_calibration:
            return
        own = self._smoothing
        saved = {name: value for name, value in state.items() if name.startswith(_SMOOTHING)}
        if {name: value.shape for name, value in own.items()} == {name: value.shape for name, value in saved.items()}:
            for name, factors in own.items():
                factors.copy_(saved[name])
            self.linears.weights_changed()
            self.wants_calibration = False

    @property
    def _smoothing(self) -> dict[str, torch.Tensor]:
        layers = ((_SMOOTHING + layer.name, layer.weight.smoothing) for layer in self.linears.layers)
        return {name: factors for name, factors in layers if factors is not None}
