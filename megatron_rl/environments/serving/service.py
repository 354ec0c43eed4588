"""What the routes of one server share."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flask_restful import Resource, abort

from megatron_rl.environments.base import Environment
from megatron_rl.environments.catalog import Catalog
from megatron_rl.environments.graders import GradeSamples
from megatron_rl.environments.naming import suggestion
from megatron_rl.environments.replay import ReplayCache
from megatron_rl.environments.serving.admission import Admission
from megatron_rl.environments.serving.counters import Counters


@dataclass(frozen=True)
class Service:
    """The environments and what is done with them."""

    catalog: Catalog
    weights: Mapping[str, float]
    replays: ReplayCache
    grade: GradeSamples
    admission: Admission
    counters: Counters
    pool_counters: Callable[[], dict[str, int]]
    """Of the worker processes; empty where there are none."""
    reading: threading.Lock = field(default_factory=threading.Lock)
    """Bodies are parsed one at a time: threads that compute at once slow the health route, not each other."""

    def counts(self) -> dict[str, Any]:
        """The answer of ``/v1/counters``; the process id tells of a restart, after which they begin at 0."""
        counts = self.counters.counts() | self.pool_counters()
        return {"pid": os.getpid(), "counters": counts, "verdicts": self.counters.verdicts()}

    def environment(self, name: str) -> Environment:
        """The environment of that name; answers 404 with the nearest names otherwise."""
        found = self.catalog.environments.get(name)
        if found is None:
            message = f"unknown environment {name!r}{suggestion(name, self.catalog.environments)}"
            abort(404, message=message)
        return found


class Serving(Resource):
    """A resource that knows the environments."""

    def __init__(self, service: Service) -> None:
        self.service = service
