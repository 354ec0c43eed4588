"""CUDA's way to record device work; all that `graphs` needs of a GPU."""

from __future__ import annotations

import weakref

import torch

from megatron_rl.inference.graphs import Work


class CudaRecorder:
    """See `Recorder`. All graphs share one memory pool: none of them leaves anything in it for another."""

    def __init__(self, device: torch.device) -> None:
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
        pool = next((graph.pool() for graph in self._graphs), None)
        graph = torch.cuda.CUDAGraph()
        # The outer stream context comes back from a capture that failed; torch's own does not. Thread-local: NCCL's
        # watchdog asks for the state of its events meanwhile, which would void a global capture.
        with torch.cuda.stream(self._stream):
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                work()
        self._graphs.add(graph)
        return graph.replay

    def used_bytes(self) -> int:
        """See `Recorder.used_bytes`; the driver's figure, because graphs take memory beside torch's."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free
