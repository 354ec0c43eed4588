"""The rollout journal: finished groups of the steps that no checkpoint covers yet.

A run that is killed goes on from its newest checkpoint. The steps after it are done again, and without a journal
all their answers would be generated and graded again. With it a group that was finished comes back as it was. Of
grades that failed the completions count, and the rollouter has them graded again.

    journal/step_0000013.rank_0.journal      one file a step and rollout replica; deleted once a checkpoint covers it

A file is a header and the groups, a line each: a CRC and JSON, with arrays of numbers in base64. A torn last line is
cut away. A file counts only if its header fits: the same random numbers, sampling and graders, the very same weights.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import re
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch

from megatron_rl.atomic import Dispensable
from megatron_rl.environments.results import result_from_json, result_to_json
from megatron_rl.platform.collectives import broadcast_json
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Branch, Completion, Request, Rollout, RolloutGroup, SourcedTask

if TYPE_CHECKING:
    from megatron_rl.inference.staged import StagedRouting

Record = dict[str, Any]
_OF_ROLLOUTS = ("grade", "prompt_ids", "branches", "agents")
_NOT_KEPT = {"cached_tokens", "scores", "prompt_scores"}
_PACKED = {"token_ids": "i", "inference_logprobs": "f"}
"""Fields of a completion that are arrays, and their number types."""
_FILE_NAME = re.compile(r"step_(\d{7,})\.rank_\d+\.journal")
_WITHOUT = "without what is missing there: a killed run would generate it again"

logger = logging.getLogger(__name__)


class RolloutJournal:
    """Owns the folder; every rank of the job has one."""

    def __init__(self, folder: Path, groups: ParallelGroups, staged: StagedRouting | None = None) -> None:
        """``staged`` where pipeline stages record the experts of their layers."""
        self._folder = folder
        self._groups = groups
        self._staged = staged
        self._dispensable = Dispensable(_WITHOUT)

    def open(self, step: int, header: Mapping[str, Any], extra_groups: ExtraGroups | None = None) -> StepJournal:
        """Open the journal of ``step``; collective in a model copy.

        ``header`` is what must be equal for an earlier start's groups to be taken up again; JSON values only.
        """
        wanted = json.loads(json.dumps({"step": step, **header}))
        found: dict[int, Record] = {}
        stream = None
        if self._groups.leads_model:
            own = self._folder / f"step_{step:07d}.rank_{self._groups.rollout_rank}.journal"
            read = {path: _read(path, wanted) for path in sorted(self._folder.glob(f"step_{step:07d}.rank_*.journal"))}
            for record in (record for records, _ in read.values() for record in records):
                # Graded again on another rank, a group is in two files: the grades that failed do not count.
                graded = all(rollout["grade"]["status"] == "ok" for rollout in record["rollouts"])
                if graded or record["number"] not in found:
                    found[record["number"]] = record
            with self._dispensable.writing(own):
                stream = _appending(own, read.get(own, ([], 0))[1], wanted)
        if self._groups.model_group.size() > 1:
            found = dict(broadcast_json(list(found.items()), self._groups.model_leader(), self._groups.model_group))
        return StepJournal(found, stream, extra_groups, self._staged, self._dispensable)

    def forget(self, step: int) -> None:
        """Delete the files up to ``step``, which a checkpoint covers. One rank calls it."""
        for path in self._folder.glob("step_*.journal"):
            name = _FILE_NAME.fullmatch(path.name)
            if name is not None and int(name[1]) <= step:
                path.unlink(missing_ok=True)


class StepJournal:
    """The journal of one step: what is known, and where new groups are written.

    Groups go by the index of their request: their number in the step, as one rank would number them. Another number
    of ranks finds them again, and so do ranks that the groups are dealt to otherwise.
    """

    def __init__(
        self,
        found: Mapping[int, Record],
        stream: BinaryIO | None = None,
        extra_groups: ExtraGroups | None = None,
        staged: StagedRouting | None = None,
        dispensable: Dispensable | None = None,
    ) -> None:
        """Without a ``stream`` nothing is written; ``extra_groups`` are groups of earlier steps."""
        self._found = found
        self._stream = stream
        self._extra_groups = extra_groups
        self._staged = staged
        self._dispensable = dispensable or Dispensable(_WITHOUT)

    def group_for(self, request: Request) -> RolloutGroup | None:
        """Find the finished group of an earlier start or step, if it answers exactly this request.

        Grades of it may have failed. Its answers' texts are left empty: they follow from the tokens.
        """
        asked, record = asked_of(request), self._found.get(request.index)
        if record is None or record["asked"] != asked:
            record = None if self._extra_groups is None else self._extra_groups.find(asked)
        if record is None:
            return None
        rollouts = tuple(rollout_of(rollout, request.hints.wants_routing) for rollout in record["rollouts"])
        completions = (completion for rollout in rollouts for completion in rollout.completions)
        if request.hints.wants_routing and any(completion.routing is None for completion in completions):
            return None  # of a start without --rl-router-replay
        group = RolloutGroup(request.source, request.prompt_ids, rollouts)
        return group if self._staged is None else self._staged.part(group)

    def add(self, index: int, group: RolloutGroup) -> None:
        """Record a finished group; a kill after this does not cost it. Every rank of a model copy calls it."""
        if self._staged is not None:
            group = self._staged.whole(group)
        if self._stream is None:
            return
        stream, self._stream = self._stream, None
        with self._dispensable.writing(stream.name):
            stream.write(_line({"number": index} | record_of(group)))
            stream.flush()  # to the operating system, which outlives this process
            self._stream = stream  # after a record that is cut short none can be read
        if self._stream is None:
            _close(stream)

    def close(self) -> None:
        """Close the file; the groups stay on record until a checkpoint covers the step."""
        if self._stream is not None:
            _close(self._stream)


class FinishedGroups:
    """The complete groups of one rollout, whichever kind of environment they are of."""

    def __init__(self, tokenizer: Tokenizer, journal: StepJournal) -> None:
        """``journal`` gets every group that is complete."""
        self._tokenizer = tokenizer
        self.journal = journal
        self._rollouts: dict[int, dict[int, Rollout]] = {}
        self.groups: dict[int, RolloutGroup] = {}
        """By the index of their request."""

    def keep(self, request: Request, sample: int, rollout: Rollout, is_new: bool = True) -> None:
        """Add a complete sample, perhaps the last of its group; ``is_new``: it is not in the journal as it is."""
        group = self._rollouts.setdefault(request.index, {})
        group[sample] = replace(rollout, text=self.text_of(rollout.completion))
        if len(group) < request.num_samples:
            return
        rollouts = tuple(group[number] for number in range(request.num_samples))
        self.groups[request.index] = RolloutGroup(request.source, request.prompt_ids, rollouts)
        if is_new:
            self.journal.add(request.index, self.groups[request.index])

    def text_of(self, completion: Completion) -> str:
        """Return its text, with the words that were read between turns."""
        return self._tokenizer.decode(completion.token_ids)

    def give_back(self, index: int) -> dict[int, Rollout]:
        """Return the complete samples of a group, by their numbers, and forget them."""
        self.groups.pop(index, None)
        return self._rollouts.pop(index, {})


class Records:
    """Groups between two steps, the same on all ranks, so that any number of ranks can go on with them."""

    def __init__(self, records: Sequence[Record] = ()) -> None:
        self.records = list(records)

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values, for a checkpoint."""
        return {"groups": list(self.records)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.records = list(state["groups"])


class ExtraGroups(Records):
    """Finished groups that no step has used yet. Their prompts come again, and are answered by them."""

    def find(self, asked: list[Any]) -> Record | None:
        """Find the record of what was asked."""
        return next((record for record in self.records if record["asked"] == asked), None)

    def drop_older(self, version: int) -> None:
        """Forget the groups with a token of weights before ``version``: their prompts are answered anew."""
        self.records = [record for record in self.records if _oldest_version(record) >= version]

    def turn_over(self, used: Sequence[SourcedTask], new: Sequence[Record]) -> None:
        """Forget the groups of prompts that a step has ``used``, and take in ``new`` ones; the same on all ranks."""
        gone = [_task_of(source) for source in used] + [record["asked"][:3] for record in new]
        self.records = [record for record in self.records if record["asked"][:3] not in gone] + list(new)


# -- records -------------------------------------------------------------------------------------


def record_of(group: RolloutGroup) -> Record:
    """Return a group as JSON values; texts are left out."""
    asked = _asked(group.source, group.prompt_ids, len(group.rollouts))
    return {"asked": asked, "rollouts": list(map(described_rollout, group.rollouts))}


def _oldest_version(record: Record) -> int:
    sequences = [each for rollout in record["rollouts"] for each in (rollout, *rollout.get("branches", ()))]
    return min(version for each in sequences for version, _ in (*each.get("older", ()), (each["policy_version"], 0)))


def asked_of(request: Request) -> list[Any]:
    """Return what a record must answer."""
    return _asked(request.source, request.prompt_ids, request.num_samples)


def _asked(source: SourcedTask, prompt_ids: Sequence[int], num_samples: int) -> list[Any]:
    return [*_task_of(source), list(prompt_ids), num_samples]


def _task_of(source: SourcedTask) -> list[Any]:
    return [source.environment, source.task.id, source.epoch]


def described_rollout(rollout: Rollout) -> Record:
    record = {**described(rollout.completion), "grade": result_to_json(rollout.grade)}
    if rollout.prompt_ids is not None:
        record["prompt_ids"] = _packed("i", rollout.prompt_ids)
    branches = [{**described(b.completion), "prompt_ids": _packed("i", b.prompt_ids)} for b in rollout.branches]
    return record | {name: each for name, each in (("branches", branches), ("agents", rollout.agents)) if each}


def described(completion: Completion) -> Record:
    """Return JSON values; without ``cached_tokens``, which differ from start to start, and scores, which are none."""
    packed: Record = {name: _packed(kind, getattr(completion, name)) for name, kind in _PACKED.items()}
    if completion.routing is not None:
        routing = completion.routing.numpy()
        packed["routing"] = [routing.dtype.name, routing.shape, base64.b64encode(routing).decode()]
    return {name: value for name, value in {**vars(completion), **packed}.items() if name not in _NOT_KEPT}


def rollout_of(record: Record, wants_routing: bool) -> Rollout:
    prompt, grade = record.get("prompt_ids"), result_from_json(record["grade"])
    branches = tuple(
        Branch(_unpacked("i", branch["prompt_ids"]), completion_of(branch, wants_routing))
        for branch in record.get("branches", ())
    )
    own = None if prompt is None else _unpacked("i", prompt)
    return Rollout(completion_of(record, wants_routing), "", grade, own, branches, tuple(record.get("agents", ())))


def completion_of(record: Record, wants_routing: bool = False) -> Completion:
    """Invert `described`."""
    fields = {name: value for name, value in record.items() if name not in _OF_ROLLOUTS}
    fields |= {name: _unpacked(kind, record[name]) for name, kind in _PACKED.items()}
    routing = fields.pop("routing", None)
    if wants_routing and routing is not None:
        kind, shape, text = routing
        fields["routing"] = torch.from_numpy(np.frombuffer(bytearray(base64.b64decode(text)), kind).reshape(shape))
    for pairs in ("environment_spans", "older"):
        fields[pairs] = tuple(map(tuple, record.get(pairs, ())))
    fields["turn_rewards"] = tuple(record.get("turn_rewards", ()))
    return Completion(**fields)


def _packed(kind: str, numbers: Sequence[float]) -> str:
    return base64.b64encode(array(kind, numbers).tobytes()).decode()


def _unpacked(kind: str, text: str) -> tuple:
    return tuple(array(kind, base64.b64decode(text)))


# -- files ---------------------------------------------------------------------------------------


def _line(record: Mapping[str, Any]) -> bytes:
    text = json.dumps(record).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _read(path: Path, header: Record) -> tuple[list[Record], int]:
    """Read the groups of a file, and where the last whole record ends: a damaged one ends the file.

    None and 0 if its header is another.
    """
    records, end = [], 0
    with path.open("rb") as stream:
        for line in stream:
            checksum, _, text = line[:-1].partition(b" ")
            if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
                break
            end += len(line)
            records.append(json.loads(text))
    if records and records[0] != header:
        logger.warning("%s is of other weights or settings: its groups are generated again", path)
        return [], 0
    return records[1:], end


def _appending(path: Path, end: int, header: Record) -> BinaryIO:
    """Open the file after its first ``end`` bytes; it begins anew if these are none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stream = path.open("ab")
    try:
        stream.truncate(end)
        if not end:
            stream.write(_line(header))
            stream.flush()
    except OSError:
        _close(stream)
        raise
    return stream


def _close(stream: BinaryIO) -> None:
    with contextlib.suppress(OSError):  # of what could not be written
        stream.close()
