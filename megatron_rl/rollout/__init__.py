"""From tasks to graded groups."""

from megatron_rl.rollout.conversations import ConversationSettings
from megatron_rl.rollout.evaluation import Evaluator
from megatron_rl.rollout.prompt_source import PromptSource, RequestFactory, TaskPool
from megatron_rl.rollout.rollouter import Rollouter, RolloutResult

__all__ = [
    "ConversationSettings",
    "Evaluator",
    "PromptSource",
    "RequestFactory",
    "RolloutResult",
    "Rollouter",
    "TaskPool",
]
