"""The application behind the environment server: what it serves, to whom, and how errors look.

::

    app         create_app: routes and guards        service    what the routes share
    guards      who may ask                          admission  how many at once
    listing     GET routes                           posting    POST routes: items in, results out, answered once
    strict      reads a body within bounds           counters   what was done
"""

from megatron_rl.environments.serving.admission import WAITING, WORKING, Admission
from megatron_rl.environments.serving.app import create_app
from megatron_rl.environments.serving.guards import MAX_BODY_BYTES

__all__ = ["MAX_BODY_BYTES", "WAITING", "WORKING", "Admission", "create_app"]
