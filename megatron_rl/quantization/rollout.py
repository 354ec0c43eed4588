"""The rollouts' number format over a run: which recipe is in use, when its copies are made anew, what comes next.

    from the flags ─► calibrate (int8_smooth) ─► rollouts ─► audit, once ─► rollouts ─► ...
                          ▲                                                      │
                          └── the next safer recipe ◄── the parity gate ◄────────┘
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from megatron_rl.quantization.audit import LayerAudit, audit, observed, refuse_other_formats
from megatron_rl.quantization.linears import QuantizedLinears
from megatron_rl.registry import RECIPES

logger = logging.getLogger(__name__)

NO_RECIPE = "none"
_SMOOTHING = "smoothing."


class RolloutQuantization:
    """Owns the quantised copies; without a recipe it does nothing."""

    def __init__(
        self,
        model: torch.nn.Module,
        recipe: str,
        skip: Sequence[str],
        num_layers: int,
        on_audit: Callable[[Sequence[LayerAudit]], None],
        timed: Callable[[str], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """``on_audit`` receives the table of the first rollout; ``timed`` opens a phase of the step's timer."""
        self._model = model
        self._copies = functools.partial(QuantizedLinears, model, skip=tuple(skip), num_layers=num_layers)
        self._on_audit = on_audit
        self._timed = timed
        self.linears: QuantizedLinears | None = None
        self.recipe = NO_RECIPE
        """Name of the recipe in use, or where it lies."""
        self._asked = recipe
        self._use(recipe)

    @property
    def stored_bytes(self) -> int:
        """Of the quantised copies on this rank."""
        return 0 if self.linears is None else self.linears.stored_bytes

    def weights_changed(self) -> None:
        """The copies must be made anew before they are used again."""
        if self.linears is not None:
            self.linears.weights_changed()

    def refresh(self) -> None:
        """Make the copies anew now; collective over the tensor-parallel ranks."""
        if self.linears is not None:
            self.linears.refresh()

    @contextlib.contextmanager
    def rollout(self, generate_a_little: Callable[[], None]) -> Iterator[None]:
        """Inside, the linears run quantised. The first time it calibrates before and audits after.

        ``generate_a_little`` runs the engine on a few prompts; only recipes that calibrate call it.

        Raises:
            QuantizationError: a weight is not finite, or a layer ran in another format.
        """
        linears = self.linears
        if linears is None:
            yield
            return
        if not self._calibrated:
            with observed(self._model, channels=True) as seen, linears.suspended():
                generate_a_little()
            linears.calibrate({name: one.channel_amax for name, one in seen.items()})
            self._calibrated = True
        with self._timed("gen/requantize"):
            linears.update()
        with linears.installed():
            if self._audited:
                yield
                return
            with observed(self._model, channels=False) as seen:
                yield
        if any(one.calls for one in seen.values()):
            self._audited = True
            rows = audit(self._model, linears, seen)
            self._on_audit(rows)
            refuse_other_formats(rows)

    @contextlib.contextmanager
    def emulated(self) -> Iterator[None]:
        """Inside, the trainer's forward pass runs on freshly quantised weights, as a rollout should have."""
        self.weights_changed()
        with contextlib.nullcontext() if self.linears is None else self.linears.installed():
            yield

    def plain(self) -> AbstractContextManager[None]:
        """Inside, the linears run in full precision, even where aligned training keeps the copies installed."""
        return contextlib.nullcontext() if self.linears is None else self.linears.suspended()

    def fall_back(self) -> str | None:
        """Go on with the next safer recipe; its name, None if there is none."""
        if self.linears is None:
            return None
        safer = self.linears.recipe.safer or NO_RECIPE
        self._use(safer)
        return safer

    def state_dict(self) -> dict[str, Any]:
        """The recipe that the flags asked for, the one in use, and its calibration on this rank, [K] fp32 by layer."""
        smoothing = {}
        if self.linears is not None and self.linears.recipe.needs_calibration and self._calibrated:
            smoothing = {_SMOOTHING + layer.name: layer.weight.smoothing for layer in self.linears.layers}
        return {"asked": self._asked, "recipe": self.recipe, **smoothing}

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
        if self.linears is None or self._calibrated:
            return
        own = {_SMOOTHING + layer.name: layer.weight.smoothing for layer in self.linears.layers}
        saved = {name: value for name, value in state.items() if name.startswith(_SMOOTHING)}
        if {n: t.shape for n, t in own.items()} != {n: t.shape for n, t in saved.items()}:
            return
        for name, factors in own.items():
            factors.copy_(saved[name])
        self.linears.weights_changed()
        self._calibrated = True

    def _use(self, name: str) -> None:
        recipe = RECIPES.get(name)
        self.linears = None  # the old buffers go before the new ones are made
        self.linears = None if recipe is None else self._copies(recipe=recipe)
        self.recipe = name if ":" in name or recipe is None else recipe.name
        self._calibrated = recipe is None or not recipe.needs_calibration
        self._audited = False
