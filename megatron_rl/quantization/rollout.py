"""The rollouts' number format over a run: which recipe is in use, when its copies are made anew, what comes next.

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

from megatron_rl.platform.device import Leaving, LeavingOf
from megatron_rl.quantization.audit import LayerAudit, audit, observed, of_all_ranks, refuse_other_formats
from megatron_rl.quantization.linears import QuantizedLinears
from megatron_rl.registry import RECIPES

logger = logging.getLogger(__name__)

_SMOOTHING = "smoothing."


class RolloutQuantization:
    """Owns the quantised copies; without a recipe there are none, and nobody needs to call anything here."""

    def __init__(
        self, model: torch.nn.Module, recipe: str, skip: Sequence[str],
        on_audit: Callable[[Sequence[LayerAudit]], None],
        timed: Callable[[str], AbstractContextManager[None]] = contextlib.nullcontext,
        lockstep_group: dist.ProcessGroup | None = None, *, quantizes_gradients: bool = False,
        leaving: LeavingOf = Leaving,
    ) -> None:  # fmt: skip
        """``on_audit`` receives the table of the first rollout; ``timed`` opens a phase of the step's timer.

        See `QuantizedLinears` for the others.
        """
        self.leaving = leaving
        """How what graphs read leaves."""
        self._model, self._asked, self._skip, self._lockstep_group = model, recipe, tuple(skip), lockstep_group
        self._on_audit, self._timed, self._quantizes_gradients = on_audit, timed, quantizes_gradients
        self._aligned = False
        self.stale: tuple[str, ...] = ()
        """Layers whose copies were of other weights when `emulated` last looked; equal on a replica's ranks."""
        self._use(recipe)

    def _use(self, name: str) -> None:
        recipe = RECIPES.get(name)
        if "linears" in vars(self):  # the old buffers go before the new ones are made
            vars(self).pop("linears").release()
        self.linears = QuantizedLinears(
            self._model, recipe, self._skip, self._lockstep_group, quantizes_gradients=self._quantizes_gradients,
            leaving=self.leaving,
        )  # fmt: skip
        self.is_quantized = recipe is not None
        """False without a recipe."""
        self.recipe = name if ":" in name or recipe is None else recipe.name
        """Name of the recipe in use, or where it lies."""
        self.wants_calibration = recipe is not None and recipe.needs_calibration
        """Whether the engine has to run a few prompts before the next `rollout`."""
        self._audited = False

    def weights_changed(self) -> None:
        """Note that the copies are of other weights: made anew at once when aligned, else before their next use.

        At once means collective over the lockstep group.
        """
        self.linears.weights_changed()
        if self._aligned:
            self.linears.refresh()

    def release(self) -> None:
        """Give the memory of the copies up until they are used again; those of aligned training stay."""
        if not self._aligned:
            self.linears.release()

    @contextlib.contextmanager
    def aligned(self) -> Iterator[None]:
        """Enter a block in which the trainer's linears run quantised too; the weights must have been read."""
        with self.linears.installed():
            self._aligned = True
            try:
                yield
            finally:
                self._aligned = False

    @contextlib.contextmanager
    def calibrating(self) -> Iterator[None]:
        """Enter a block in which the linears run as they are and are watched; what they see smooths their copies."""
        linears = self.linears
        with observed(self._model, channels=True) as seen, linears.suspended():
            yield
        linears.calibrate({name: one.channel_amax for name, one in seen.items()})
        self.wants_calibration = False

    @contextlib.contextmanager
    def rollout(self) -> Iterator[None]:
        """Run the linears quantised inside the block, on fresh copies. The first time it audits after; collective.

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
            with observed(self._model, channels=False) as seen:
                yield
        rows = of_all_ranks(audit(self._model, linears, seen), self._lockstep_group)
        if any(row.calls for row in rows):
            self._audited = True
            self._on_audit(rows)
            refuse_other_formats(rows)

    @contextlib.contextmanager
    def emulated(self) -> Iterator[None]:
        """Run the trainer's forward pass on freshly quantised weights inside the block, as a rollout should have.

        `stale` says which copies were of other weights before; collective.
        """
        self.stale = tuple(self.linears.renew())
        with self.linears.installed():
            yield

    def fall_back(self) -> str | None:
        """Go on with the next safer recipe; its name, None if there is none."""
        if not self.is_quantized:
            return None
        self._use(self.linears.recipe.safer)
        return self.recipe

    def state_dict(self) -> dict[str, Any]:
        """Return the recipe of the flags, the one in use, and its calibration on this rank, [K] fp32 by layer."""
        return {"asked": self._asked, "recipe": self.recipe, **({} if self.wants_calibration else self._smoothing)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the recipe and the calibration of a checkpoint, so that a resumed run rounds as it would have.

        Not if the flags ask for another recipe now. A calibration of other layers or shapes (another parallel layout)
        is made anew.
        """
        if state["asked"] != self._asked:
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
