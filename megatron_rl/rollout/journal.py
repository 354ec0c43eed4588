"""The rollout journal: finished groups of the steps that no checkpoint covers yet.

A run that is killed goes on from its newest checkpoint. The steps after it are done again, and without a journal
all their answers would be generated and graded again. With it a group that was finished comes back as it was. Of
grades that failed the completions count, and the rollouter has them graded again.

    journal/step_0000013.rank_0.bin      one file a step and data-parallel rank; deleted once a checkpoint covers it

A file is a header and one record a group. A record is checked by its CRC; a torn last one is cut away. A file
counts only if its header fits: the same random numbers, sampling and graders, and the very same weights.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import struct
import zlib
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from megatron_rl.environments.results import result_to_json, results_from_json
from megatron_rl.parallel import ParallelGroups
from megatron_rl.parallel.collectives import broadcast_json
from megatron_rl.types import Completion, GenerationRequest, Rollout, RolloutGroup

_FRAME = struct.Struct("<4sIII")
"""Magic, length of the JSON, length of the numbers, CRC-32 of both."""
_MAGIC = b"MRLJ"
_FILE_NAME = re.compile(r"step_(\d{7,})\.rank_\d+\.bin")

logger = logging.getLogger(__name__)


class RolloutJournal:
    """Owns the folder; every rank of the job has one."""

    def __init__(self, folder: Path, groups: ParallelGroups) -> None:
        self._folder = folder
        self._groups = groups

    def open(self, step: int, header: Mapping[str, Any]) -> StepJournal:
        """The journal of ``step``; collective in a model copy.

        ``header`` is what must be equal for an earlier start's groups to be taken up again; JSON values only.
        """
        wanted = json.loads(json.dumps({"step": step, **header}))
        found: dict[int, bytes] = {}
        own = self._folder / f"step_{step:07d}.rank_{self._groups.data_rank}.bin"
        stream = None
        if self._groups.leads_model:
            for path in sorted(self._folder.glob(f"step_{step:07d}.rank_*.bin")):
                for index, record in _groups_of(path, wanted).items():
                    # Graded again on another rank, a group is in two files: the grades that failed do not count.
                    if index not in found or not _lacks_grades(record):
                        found[index] = record
            stream = _appending(own, wanted)
        if self._groups.model_group.size() > 1:
            found = _shared(found, self._groups)
        return StepJournal(found, stream)

    def forget(self, step: int) -> None:
        """A checkpoint covers ``step``: the files up to it are not needed any more. One rank calls it."""
        for path in self._folder.glob("step_*.bin"):
            name = _FILE_NAME.fullmatch(path.name)
            if name is not None and int(name[1]) <= step:
                path.unlink(missing_ok=True)


class StepJournal:
    """What is known of one step, and where to write what becomes known.

    Groups go by the index of their request: their number in the step, as one rank would number them. Another number
    of ranks finds them again, and so do ranks that the groups are dealt to otherwise.
    """

    def __init__(self, found: Mapping[int, bytes], stream: BinaryIO | None) -> None:
        self._found = found
        self._stream = stream

    def group_for(self, request: GenerationRequest) -> RolloutGroup | None:
        """The finished group of an earlier start, if it is the answer to exactly this request.

        Its texts are left empty: they follow from the tokens.
        """
        record = self._found.get(request.index)
        return None if record is None else _decode(record, request)

    def add(self, index: int, group: RolloutGroup) -> None:
        """Record a finished group; a kill after this does not cost it."""
        if self._stream is None:
            return
        try:
            self._stream.write(_encode(index, group))
            self._stream.flush()  # to the operating system, which outlives this process
        except OSError as error:  # a full disk costs a killed run some time, and this one nothing
            logger.warning("%s cannot be written (%s): this step goes on without", self._stream.name, error.strerror)
            self._stream = None

    def close(self) -> None:
        """Close the file; the groups stay on record until a checkpoint covers the step."""
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.close()


def _encode(number: int, group: RolloutGroup) -> bytes:
    source = group.source
    described = {
        "number": number,
        "environment": source.environment,
        "task": source.task.id,
        "epoch": source.epoch,
        "prompt": len(group.prompt_ids),
        "rollouts": [
            {
                "tokens": len(rollout.completion.token_ids),
                "finish_reason": rollout.completion.finish_reason,
                "policy_version": rollout.completion.policy_version,
                "environment_spans": rollout.completion.environment_spans,
                "grade": result_to_json(rollout.grade),
            }
            for rollout in group.rollouts
        ],
    }
    ids, logprobs = array("i", group.prompt_ids), array("f")
    for rollout in group.rollouts:
        ids.extend(rollout.completion.token_ids)
        logprobs.extend(rollout.completion.inference_logprobs)
    return _framed(described, ids.tobytes() + logprobs.tobytes())


def _framed(described: Mapping[str, Any], numbers: bytes = b"") -> bytes:
    text = json.dumps(described).encode()
    return _FRAME.pack(_MAGIC, len(text), len(numbers), zlib.crc32(text + numbers)) + text + numbers


def _decode(record: bytes, request: GenerationRequest) -> RolloutGroup | None:
    """The group of a record; None if it answers another request."""
    _, size, _, _ = _FRAME.unpack_from(record)
    described = json.loads(record[_FRAME.size : _FRAME.size + size])
    ids, logprobs = array("i"), array("f")
    tokens = [rollout["tokens"] for rollout in described["rollouts"]]
    first = _FRAME.size + size
    middle = first + 4 * (described["prompt"] + sum(tokens))
    ids.frombytes(record[first:middle])
    logprobs.frombytes(record[middle:])
    source, prompt = request.source, tuple(ids[: described["prompt"]])
    asked = (source.environment, source.task.id, source.epoch, request.prompt_ids, request.num_samples)
    answered = (described["environment"], described["task"], described["epoch"], prompt, len(tokens))
    if asked != answered:
        return None
    rollouts, at = [], 0
    for rollout, count in zip(described["rollouts"], tokens, strict=True):
        completion = Completion(
            token_ids=tuple(ids[len(prompt) + at : len(prompt) + at + count]),
            inference_logprobs=tuple(logprobs[at : at + count]),
            finish_reason=rollout["finish_reason"],
            policy_version=rollout["policy_version"],
            environment_spans=tuple((start, end) for start, end in rollout["environment_spans"]),
        )
        (grade,) = results_from_json({"items": [rollout["grade"]]}, 1)
        rollouts.append(Rollout(completion, "", grade))
        at += count
    return RolloutGroup(source, prompt, "", tuple(rollouts))


def _records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Whole records and the offsets they end at; a damaged one ends the file, for what follows has no border."""
    with path.open("rb") as stream:
        while len(frame := stream.read(_FRAME.size)) == _FRAME.size:
            magic, text, numbers, crc = _FRAME.unpack(frame)
            body = stream.read(text + numbers) if magic == _MAGIC else b""
            if len(body) != text + numbers or zlib.crc32(body) != crc:
                return
            yield stream.tell(), frame + body


def _description(record: bytes) -> dict[str, Any]:
    size = _FRAME.unpack_from(record)[1]
    return json.loads(record[_FRAME.size : _FRAME.size + size])


def _lacks_grades(record: bytes) -> bool:
    return any(rollout["grade"]["status"] != "ok" for rollout in _description(record)["rollouts"])


def _groups_of(path: Path, header: Mapping[str, Any]) -> dict[int, bytes]:
    """The records of a file by the number of their group; none if its header is another."""
    records = [record for _, record in _records(path)]
    if not records:
        return {}
    if _description(records[0]) != header:
        logger.warning("%s is of other weights or settings: its groups are generated again", path)
        return {}
    return {_description(record)["number"]: record for record in records[1:]}


def _appending(path: Path, header: Mapping[str, Any]) -> BinaryIO:
    """The file, open after its last whole record; begun anew if its header is another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    ends = [(end, record) for end, record in _records(path)]
    fits = bool(ends) and _description(ends[0][1]) == header
    stream = path.open("r+b")
    stream.truncate(ends[-1][0] if fits else 0)
    stream.seek(0, 2)
    if not fits:
        stream.write(_framed(header))
        stream.flush()
    return stream


def _shared(found: Mapping[int, bytes], groups: ParallelGroups) -> dict[int, bytes]:
    """The leader's records on every rank of the model copy."""
    leader, group = groups.model_leader(), groups.model_group
    sizes = broadcast_json([(number, len(record)) for number, record in found.items()], leader, group)
    if not sizes:
        return {}
    whole = bytearray(b"".join(found.values())) if groups.leads_model else bytearray(sum(n for _, n in sizes))
    data = torch.frombuffer(whole, dtype=torch.uint8)
    dist.broadcast(data, leader, group=group)
    shared, at = {}, 0
    for number, size in sizes:
        shared[number] = bytes(whole[at : at + size])
        at += size
    return shared
