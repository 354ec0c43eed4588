"""CUDA's way to record device work; all that `graphs` needs of a GPU."""

from __future__ import annotations

import contextlib
import weakref

import torch

from megatron_rl.inference.graphs import Work


class CudaRecorder:
    """See `Recorder`. All graphs share one memory pool: none of them leaves anything in it for another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def warm_up(self, work: Work) -> None:
        """See `Recorder.warm_up`; on the stream of the capture, so that its libraries have their workspaces."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, work: Work) -> Work:
        """See `Recorder.record`."""
        # A pool is given up with its last graph, so without one a new capture needs a new pool.
        pool = next((graph.pool() for graph in self._graphs), None) or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            # The outer stream context comes back from a capture that failed; torch's own does not. Thread-local:
            # NCCL's watchdog asks for the state of its events meanwhile, which would void a global capture.
            with torch.cuda.stream(self._stream):
                with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                    work()
        except BaseException:
            self._leave(pool)
            raise
        self._graphs.add(graph)
        return graph.replay

    def used_bytes(self) -> int:
        """See `Recorder.used_bytes`; the driver's figure, because graphs take memory beside torch's."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def _leave(self, pool: tuple[int, int]) -> None:
        """Stop allocating in ``pool``, which a capture that CUDA refused does not do by itself.

        Every later ``torch.cuda.empty_cache()`` would end in "captures_underway.empty() INTERNAL ASSERT FAILED".
        """
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        with contextlib.suppress(RuntimeError):  # a capture that ended before the error has stopped, and let go
            torch._C._cuda_endAllocateToPool(index, pool)
            torch._C._cuda_releasePool(index, pool)
