"""How files come to the disk while training goes on, and how a failure on one rank becomes one on all.

    this process     state ─► fork ───► steps, steps, ... ─► metadata ─► steps ...
    forked writer             └► tensor files, fsync ──┘
    thread (rank 0)                                          └► checksums, rename, latest

A fork holds the weights as they were, so no step waits for the disk. A process that uses a GPU does not fork: it copies
the tensors to the host, and a thread writes them (`_ThreadedCaller`). Until the rename nothing of it counts: a kill at
any moment leaves the checkpoint before it.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import multiprocessing.process
import os
import queue
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest, TemporalAsyncCaller
from megatron.core.dist_checkpointing.strategies.filesystem_async import WriteBucket
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.errors import CheckpointError, SaveError, cut
from megatron_rl.platform.collectives import gather_json
from megatron_rl.platform.megatron import watched_writers

T = TypeVar("T")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CUT_SHORT = "enforce fail at inline_container"
"""All that torch says of a file that could be written in part only."""


def succeed_on_all_ranks(act: Callable[[], T]) -> T:
    """Return what ``act`` returns once it succeeded on all ranks: one that fails would leave the others waiting.

    Raises:
        CheckpointError: it did on one; on every rank.
    """
    result, problem = None, ""
    try:
        result = act()
    except CheckpointError as error:
        problem = str(error)
    problems = [text for text in gather_json(problem, dist.group.WORLD) if text]
    if problems:
        raise CheckpointError(problem or problems[0])
    return result


class SaveAttempt:
    """One save into ``directory``, which does not count yet.

    What fails in a `part` is noted, the save goes on to a moment at which all ranks meet, and `agree` raises it on all.
    """

    def __init__(self, directory: Path, is_main: bool) -> None:
        self._directory = directory
        self._is_main = is_main
        self._problem: str | None = None

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        """Note a failure of this rank's own disk; no collective may be in here."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            self._note(error)
            # Its frames hold views of what was to be written. CPython 3.12.1 dies of those when it collects garbage
            # (its issue 111211), so a full disk ended the run.
            traceback.clear_frames(error.__traceback__)

    @contextlib.contextmanager
    def collective_part(self) -> Iterator[None]:
        """Guard a save by megatron-core, from its start to its end: either may fail on any rank.

        What it raises on every rank is noted, and so is what its writes would raise on one. All else goes on up.
        """
        with watched_writers(self.part):
            try:
                yield
            except CheckpointException as error:
                self._note(next((cause for cause, _ in error.failures.values()), None))

    def agree(self) -> None:
        """Go on if all ranks can; collective.

        Raises:
            SaveError: on every rank, when a part failed on one. What was written is deleted: a disk that is
                full has room again, and the run's small files with it.
        """
        problems = [problem for problem in gather_json(self._problem, dist.group.WORLD) if problem is not None]
        if not problems:
            return
        if self._is_main:
            shutil.rmtree(self._directory, ignore_errors=True)
        raise SaveError(next(filter(None, problems), "a rank could not write"))

    def _note(self, error: BaseException | None) -> None:
        """The first failure is the one to tell: others follow from it. Empty where another rank knows the cause."""
        if self._problem is None:
            self._problem = "" if error is None else _message(self._directory, error)


def _message(directory: Path, error: BaseException) -> str:
    cause: BaseException = error
    while not isinstance(cause, OSError) and cause.__cause__ is not None:
        cause = cause.__cause__
    text, what, fault = " ".join(str(cause).split()), f"the checkpoint {str(directory)!r}", _shared_memory_fault()
    if fault is not None:
        return f"{what} could not be written: {fault}; the checkpoints before it are as they were"
    is_full = _CUT_SHORT in text or any(os.strerror(number) in text for number in _FULL)
    fix = "free space there, or give --save" if is_full else "look after that disk, or give --save"
    return (
        f"{what} could not be written ({cut(text, 200)}); {fix} a directory on another disk; the checkpoints before it "
        "are as they were"
    )


def _shared_memory_fault() -> str | None:
    """Return why processes that write a checkpoint cannot lock: the kernel's error names neither them nor a file."""
    try:
        multiprocessing.get_context("fork").Lock()
    except OSError as error:
        if error.errno != errno.EFBIG:  # a limit of this process, for its files everywhere
            return f"/dev/shm has no room for a lock ({error.strerror}); make it writable, or larger (--shm-size=1g)"
    return None


class _ThreadedCaller(TemporalAsyncCaller):
    """Writes in a thread of this process, where megatron-core's own forks one.

    The copies on the host are in memory that CUDA pinned, which a forked child cannot rely on: such writers were seen
    to die of SIGSEGV (Megatron-LM issue 1861). Nor may it call CUDA, not even to free a tensor. A thread may do all
    that, and torch writes without Python's lock, so training goes on.
    """

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Copy the tensors to the host, and begin to write them."""
        if async_req.async_fn is None:
            return
        rank, buckets, results = async_req.async_fn_args
        staged = _staged(buckets, async_req.preload_fn() if async_req.preload_fn else buckets)
        self.start_time = time.time()
        self.process = threading.Thread(
            target=async_req.async_fn, args=(rank, staged, results), kwargs=async_req.async_fn_kwargs,
            name="write checkpoint", daemon=True,
        )  # fmt: skip
        self.process.start()


def _staged(buckets: Sequence[WriteBucket], on_host: Sequence[WriteBucket]) -> list[WriteBucket]:
    """``on_host`` with copies of the tensors that were there before: training goes on in these."""
    copied = []
    for (*_, (_, before)), (file, key, (objects, after)) in zip(buckets, on_host, strict=True):
        own = [
            (item, tensor.clone() if tensor is original else tensor)
            for (_, original), (item, tensor) in zip(before, after, strict=True)
        ]
        copied.append((file, key, (objects, own)))
    return copied


class _ThreadedCalls(AsyncCallsQueue):
    def _get_async_caller(self) -> TemporalAsyncCaller:
        return _ThreadedCaller()


class BackgroundSave:
    """One save under way; every rank has one and makes the same calls."""

    def __init__(
        self, request: AsyncRequest, attempt: SaveAttempt, commit: Callable[[], None] | None, on_cuda: bool = False
    ) -> None:
        """Begins to write: in a fork, or with ``on_cuda`` in a thread.

        ``commit`` is called in a thread when all ranks' files are there, by rank 0 alone.
        """
        self._queue = _ThreadedCalls() if on_cuda else AsyncCallsQueue()
        self._queue.schedule_async_request(request)
        self._attempt = attempt
        self._commit = commit
        self._thread: threading.Thread | None = None
        self._written = False

    def go_on(self, wait: bool) -> None:
        """Continue saving without waiting, or with ``wait`` until the checkpoint is committed; collective until then.

        Raises:
            SaveError: on every rank; it could not be written.
        """
        if not self._written:
            with self._attempt.collective_part():
                self._queue.maybe_finalize_async_calls(blocking=wait)
            if self._queue.get_num_unfinalized_calls():
                return
            self._attempt.agree()
            self.begin_to_commit()
        if wait:
            if self._thread is not None:
                self._thread.join()
            self._attempt.agree()

    def abandon(self) -> None:
        """Ends the writer, a thread with the process; what it wrote never counts. For a run that ends by an error."""
        if self._thread is not None:
            self._thread.join()
        for call in self._queue.async_calls:
            writer = call.async_caller.process  # megatron's own close(abort=True) leaves these running
            if isinstance(writer, multiprocessing.process.BaseProcess):
                writer.kill()
                writer.join()

    def begin_to_commit(self) -> None:
        """Commit the files of all ranks, which are there: rank 0 does, in a thread."""
        self._written = True
        if self._commit is not None:
            self._thread = threading.Thread(target=self._attempt.part()(self._commit), name="commit checkpoint")
            self._thread.start()


class ResultQueue:
    """Hands over what this process or a fork of it has put, through a file in memory that both hold open.

    megatron's own queue is a third process. It imports torch to pass on the first result, which takes seconds and
    200 MB, and it lives on when its parent is killed. A pipe would block its writer after 64 KiB.
    """

    def __init__(self) -> None:
        self._file = Path(f"/proc/self/fd/{os.memfd_create('written')}")

    def put(self, results: Any) -> None:
        """Replaces what nobody has taken: of a save that was given up.

        Raises:
            OSError: it could be written in part only; then nothing was put.
        """
        try:
            self._file.write_bytes(ForkingPickler.dumps(results))
        except OSError:
            os.truncate(self._file, 0)
            raise

    def get_nowait(self) -> Any:
        """Takes what was put last.

        Raises:
            queue.Empty: nothing was, or it was taken before.
        """
        written = self._file.read_bytes()
        if not written:
            raise queue.Empty
        os.truncate(self._file, 0)
        return ForkingPickler.loads(written)
