"""The application: routes, guards, and JSON for every error."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from flask import Flask, Response
from flask_restful import Api

from megatron_rl.environments.base import Environment
from megatron_rl.environments.catalog import Catalog
from megatron_rl.environments.graders import GradeSamples, grade_in_process
from megatron_rl.environments.loading.supervise import LOAD_SECONDS
from megatron_rl.environments.replay import ReplayCache
from megatron_rl.environments.serving.admission import Admission
from megatron_rl.environments.serving.counters import Counters
from megatron_rl.environments.serving.guards import guard
from megatron_rl.environments.serving.listing import (
    Demonstrations,
    EnvironmentList,
    Health,
    OneEnvironment,
    ServerCounters,
    Tasks,
)
from megatron_rl.environments.serving.posting import Grade, Step
from megatron_rl.environments.serving.service import Service

REPLAYED_REQUESTS = 1024


def create_app(
    environments: Mapping[str, Environment],
    token: str,
    grade: GradeSamples = grade_in_process,
    *,
    hosts: Collection[str] | None = None,
    admission: Admission | None = None,
    pool_counters: Callable[[], dict[str, int]] = dict,
    weights: Mapping[str, float] | None = None,
    list_seconds: float = LOAD_SECONDS,
) -> Flask:
    """The application that serves ``environments`` to whoever presents ``token``.

    ``hosts`` are the values of the Host header that are answered, any if None. ``weights`` are the shares of the
    training prompts, 1 each if None; reading the tasks of a split may take ``list_seconds``.
    """
    admission, counters = admission or Admission(), Counters()
    app = Flask("megatron_rl.environments", static_folder=None)
    app.config["RESTFUL_JSON"] = {"allow_nan": False}  # its default writes NaN, which is not JSON
    guard(app, token, hosts, admission, counters)
    api = _JsonApi(app)
    replays = ReplayCache(REPLAYED_REQUESTS)
    catalog = Catalog(environments, list_seconds)
    service = Service(catalog, weights or {}, replays, grade, admission, counters, pool_counters)
    shared = {"resource_class_kwargs": {"service": service}}
    one = "/v1/environments/<string:name>"
    api.add_resource(Health, "/v1/health", endpoint="health")
    api.add_resource(ServerCounters, "/v1/counters", endpoint="counters", **shared)
    api.add_resource(EnvironmentList, "/v1/environments", **shared)
    api.add_resource(OneEnvironment, one, **shared)
    api.add_resource(Tasks, f"{one}/tasks", **shared)
    api.add_resource(Demonstrations, f"{one}/demonstrations", **shared)
    api.add_resource(Grade, f"{one}/grade", **shared)
    api.add_resource(Step, f"{one}/step", **shared)
    return app


class _JsonApi(Api):
    """flask-restful leaves unknown URLs and methods to Flask, which answers in HTML."""

    def error_router(self, original_handler: Callable, e: Exception) -> Response:
        """JSON, whatever the error and the URL."""
        return self.handle_error(e)
