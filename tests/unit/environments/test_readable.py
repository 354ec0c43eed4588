"""Waiting for what can be read, whatever the number of the descriptor."""

from __future__ import annotations

import os
import resource

from megatron_rl.environments.readable import readable


def test_descriptors_above_1023_are_waited_for() -> None:
    """``select.select`` refuses them."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    high = 1500
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], high + 1), max(limits[1], high + 1)))
    reader, writer = os.pipe()
    try:
        os.dup2(reader, high)
        assert readable(high, seconds=0) == []
        os.write(writer, b"x")
        assert readable(high, seconds=0) == [high]
        assert readable(high, reader, seconds=0) == [high, reader]
        os.read(high, 1)
    finally:
        for descriptor in (reader, writer, high):
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_an_end_can_be_read_and_a_wait_ends() -> None:
    reader, writer = os.pipe()
    assert readable(reader, seconds=0.01) == []
    os.close(writer)
    assert readable(reader, seconds=10) == [reader]
    os.close(reader)
