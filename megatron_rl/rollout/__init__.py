"""From tasks to graded groups."""

from megatron_rl.rollout.conversations import ConversationSettings
from megatron_rl.rollout.evaluation import Evaluator
from megatron_rl.rollout.prompt_source import Draw, PromptSource, TaskPool
from megatron_rl.rollout.requests import RequestFactory
from megatron_rl.rollout.rollouter import Rollouter, RolloutResult

__all__ = [
    "ConversationSettings",
    "Draw",
    "Evaluator",
    "PromptSource",
    "RequestFactory",
    "RolloutResult",
    "Rollouter",
    "TaskPool",
]
