"""What the routes of one server share."""

from __future__ import annotations

from dataclasses import dataclass

from flask_restful import Resource, abort

from megatron_rl.environments.base import Environment
from megatron_rl.environments.catalog import Catalog
from megatron_rl.environments.graders import GradeSamples
from megatron_rl.environments.naming import suggestion
from megatron_rl.environments.replay import ReplayCache


@dataclass(frozen=True)
class Service:
    """The environments and what is done with them."""

    catalog: Catalog
    replays: ReplayCache
    grade: GradeSamples

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
