"""Graded samples become groups, which the journal keeps."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.rollout.journal import StepJournal
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Request, Rollout, RolloutGroup


class FinishedGroups:
    """The complete groups of one rollout, whichever kind of environment they are of."""

    def __init__(self, tokenizer: Tokenizer, journal: StepJournal | None) -> None:
        """``journal`` gets every group that is complete."""
        self._tokenizer = tokenizer
        self._journal = journal
        self._rollouts: dict[int, dict[int, Rollout]] = {}
        self.groups: dict[int, RolloutGroup] = {}
        """By the index of their request."""

    def known(self, request: Request) -> RolloutGroup | None:
        """The group of an earlier start, if it was finished; grades of it may have failed."""
        return None if self._journal is None else self._journal.group_for(request)

    def keep(self, request: Request, sample: int, rollout: Rollout, is_new: bool = True) -> None:
        """A sample is complete, and perhaps its group; ``is_new``: it is not in the journal as it is."""
        group = self._rollouts.setdefault(request.index, {})
        group[sample] = replace(rollout, text=self._tokenizer.decode(rollout.completion.token_ids))
        if len(group) < request.num_samples:
            return
        rollouts = tuple(group[number] for number in range(request.num_samples))
        self.groups[request.index] = RolloutGroup(request.source, request.prompt_ids, rollouts)
        if is_new and self._journal is not None:
            self._journal.add(request.index, self.groups[request.index])
