"""The application behind the environment server: what it serves, to whom, and how errors look.

::

    app         create_app: routes and guards        service    what the routes share
    guards      who may ask, and for what            posting    POST routes: items in, results out, answered once
    listing     GET routes
"""

from megatron_rl.environments.serving.app import create_app
from megatron_rl.environments.serving.guards import MAX_BODY_BYTES

__all__ = ["MAX_BODY_BYTES", "create_app"]
