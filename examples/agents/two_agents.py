"""Two agents in one sample: a planner says how to add two numbers, and a worker who reads the plan adds them.

    - {environment: "examples/agents/two_agents.py:PlannerAndWorker"}

Both are the same policy. Each has its own reward, and is compared with the same agent in the other samples of the task.
"""

from __future__ import annotations

from collections.abc import Iterator

import openai

from megatron_rl.environments.base import HarnessEnvironment
from megatron_rl.types import Grade, Split, Task


class PlannerAndWorker(HarnessEnvironment):
    """Adds two numbers by a plan."""

    name = "planner_and_worker"

    def tasks(self, split: Split) -> Iterator[Task]:
        """Sums up to 198, one in eight held out."""
        for number in range(10_000):
            first, second = divmod(number, 100)
            if (number % 8 == 0) == (split == "test"):
                yield Task(str(number), f"{first}+{second}?", {"gold": str(first + second)})

    def run(self, task: Task, client: openai.OpenAI) -> Grade:
        """Reward the worker for the sum, or a little for digits; the planner as the worker, and for a short plan."""
        plan = say(self.agent_client(client, "planner"), f"{task.prompt} Plan: ")
        answer = say(self.agent_client(client, "worker"), f"{task.prompt} {plan} Sum: ").strip()
        right = answer == task.data["gold"]
        worker = 1.0 if right else 0.1 * sum(map(str.isdigit, answer)) / max(1, len(answer))
        rewards = {"planner": worker - 0.001 * len(plan), "worker": worker}
        return Grade(float(right), agent_rewards=rewards, correct=right)

    def gold_turns(self, task: Task) -> list[str]:
        """A plan, and the sum."""
        return ["Add tens, then ones.", task.data["gold"]]


def say(client: openai.OpenAI, text: str) -> str:
    """Return the model's answer to one message."""
    answer = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}])
    return answer.choices[0].message.content or ""
