"""When and what to save; how a run starts from what was saved."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron_rl.atomic import remove
from megatron_rl.checkpoint import tensors
from megatron_rl.checkpoint.foreign import is_foreign
from megatron_rl.checkpoint.layout import (
    commit,
    find_checkpoint,
    newest_valid,
    remove_old,
    set_aside_newer,
    step_entries,
    temporary_directory,
)
from megatron_rl.checkpoint.run_state import RunState, read_run_state, write_run_state
from megatron_rl.checkpoint.saving import BackgroundSave, SaveAttempt, succeed_on_all_ranks
from megatron_rl.checkpoint.state import save_rank_state, with_rank_state
from megatron_rl.checkpoint.stored import load_weights
from megatron_rl.checkpoint.tensors import save_tensors
from megatron_rl.errors import SaveError
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.collectives import broadcast_json
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.optimizer import Optimization

logger = logging.getLogger(__name__)


class CheckpointManager:
    """Saves into one directory; every call is collective over the job."""

    def __init__(self, root: Path, keep_last: int, groups: ParallelGroups) -> None:
        self._root = root
        self._keep_last = keep_last
        self._groups = groups
        self._start = ""
        self._saved_step: int | None = None
        self._under_way: BackgroundSave | None = None
        self.failed_saves = 0
        """Since the start of this process."""

    def save(
        self,
        state: RunState,
        policy: PolicyModel,
        optimization: Optimization,
        *,
        critic: Optimization | None = None,
        in_background: bool = False,
        is_best: bool = False,
        committed: Callable[[], None] = lambda: None,
    ) -> None:
        """Write and commit the checkpoint of ``state.step``, once.

        With ``in_background`` the files are written while training goes on, and the checkpoint counts some `poll`
        later. ``committed`` is called on the main rank once it does. One save is under way at a time.

        Raises:
            SaveError: on every rank; it could not be written. The checkpoints before it are as they were, and the
                same step may be tried again.
        """
        self.finish()
        if state.step == self._saved_step:
            return
        try:
            attempt, target = self._begin(state.step)
            beside = None
            for model in filter(None, (optimization, critic)):
                model.gather_parameters()
            if critic is not None:
                beside = critic.policy, critic if state.critic_has_optimizer else None
            tensors_of = optimization if state.has_optimizer else None
            with attempt.collective_part():
                request = save_tensors(target, policy, tensors_of, in_background, beside)
            with attempt.part():
                save_rank_state(target, self._groups.rank, state.components)
                if self._groups.is_main:
                    write_run_state(target, state)
            attempt.agree()
            commit_it = partial(self._commit, state.step, is_best, committed) if self._groups.is_main else None
            if in_background:
                self._under_way = BackgroundSave(request, attempt, commit_it, policy.device.type == "cuda")
            else:
                with attempt.part():
                    if commit_it is not None:
                        commit_it()
                attempt.agree()
        except SaveError:
            self.failed_saves += 1
            raise
        self._saved_step = state.step

    def poll(self) -> None:
        """Go on with a save in the background, if there is one; waits for nothing, and a failure is no error."""
        self._go_on(wait=False)

    def finish(self) -> None:
        """Wait for a save in the background, if there is one; that it failed is no error of what comes next."""
        self._go_on(wait=True)

    def abandon(self) -> None:
        """Give up a save in the background: the run ends by an error, and other ranks may be gone."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.abandon()

    def _go_on(self, wait: bool) -> None:
        if self._under_way is None:
            return
        try:
            self._under_way.go_on(wait)
        except SaveError as error:
            self.failed_saves += 1
            self._under_way = self._saved_step = None  # the step may be saved again
            logger.warning("NOT SAVED: %s; the run goes on", error)
        if wait:
            self._under_way = None

    def _begin(self, step: int) -> tuple[SaveAttempt, Path]:
        """An empty directory that no earlier start of the run writes into."""
        if not self._start:
            self._start = broadcast_json(uuid.uuid4().hex[:8] if self._groups.is_main else "", source=0)
        target = temporary_directory(self._root, step, self._start)
        attempt = SaveAttempt(target, self._groups.is_main)
        with attempt.part():
            if self._groups.is_main:
                remove(target)
                target.mkdir(parents=True)
        attempt.agree()
        return attempt, target

    def _commit(self, step: int, is_best: bool, committed: Callable[[], None]) -> None:
        """On the main rank: from now on it counts."""
        directory = commit(self._root, step, self._start, is_best)
        remove_old(self._root, self._keep_last)
        committed()
        logger.info("saved %s", directory)

    @property
    def saved_step(self) -> int | None:
        """Step of the newest checkpoint; None if this process knows of none, or one is being saved."""
        return self._saved_step if self._under_way is None else None

    def newest(self) -> Path | None:
        """Return the checkpoint to resume from, if this directory has one; damaged newer ones are set aside."""
        return self._agreed(self._newest_of_own)

    def find(self, path: str) -> Path:
        """Find the checkpoint a user means by ``path``."""
        return self._agreed(lambda: find_checkpoint(path))

    def start_from_weights(self, path: str, policy: PolicyModel) -> Path:
        """Load weights only, for `--pretrained-checkpoint` or `--load` with `--finetune`; return their checkpoint."""
        directory = self.find(path)
        self._load(directory, policy)
        by_others = ", written by Megatron-LM, whose optimizer state is not taken" if is_foreign(directory) else ""
        logger.info("weights from %s%s", directory, by_others)
        return directory

    def resume(
        self,
        directory: Path,
        policy: PolicyModel,
        optimization: Optimization,
        with_optimizer: bool = True,
        critic: Optimization | None = None,
    ) -> RunState:
        """Fill model, critic and optimizers with what ``directory`` holds; the rest is for a `StateRegistry`."""
        state = read_run_state(directory)
        if directory.parent == self._root:
            self._saved_step = state.step
        kept = optimization if state.has_optimizer and with_optimizer else None
        kept_critic = critic if state.critic_has_optimizer and with_optimizer else None
        # Where main parameters are made of the weights, these must come as they are in the files.
        is_filled = kept is None and policy.fp8_weights is not None
        with policy.fp8_weights.bf16_weights() if is_filled else contextlib.nullcontext():
            self._load(directory, policy, kept, None if critic is None else (critic.policy, kept_critic))
        for model, has_state in ((optimization, kept), (critic, kept_critic)):
            if model is not None and has_state is None:
                model.reload_main_parameters()
                logger.info("the optimizer%s starts without moments", " of the critic" if model is critic else "")
            if model is not None:  # the schedule is a function of the step's number, so it goes on either way
                model.schedule.set_step(state.step)
        logger.info("resumed from %s (step %d)", directory, state.step)
        return replace(state, components=with_rank_state(state.components, directory, self._groups.rank))

    def _load(
        self,
        directory: Path,
        policy: PolicyModel,
        optimization: Optimization | None = None,
        critic: tensors.Model | None = None,
    ) -> None:
        if is_foreign(directory):
            load_weights(directory, policy, self._groups)
        else:
            tensors.load(directory, policy, optimization, critic)

    def _newest_of_own(self) -> Path | None:
        if not step_entries(self._root):
            logger.info("no checkpoint in %s yet: starting at the beginning", self._root)
            return None
        newest = newest_valid(self._root)
        set_aside_newer(newest)
        return newest

    def _agreed(self, look: Callable[[], Path | None]) -> Path | None:
        """What rank 0 finds: hashed once for all, and no two ranks can choose differently."""
        found = succeed_on_all_ranks(look if self._groups.is_main else lambda: None)
        path = broadcast_json(found and str(found), source=0)
        return path and Path(path)
