"""An OpenEnv environment and its server, written with OpenEnv's own package, and nothing of ours.

    uvicorn --app-dir examples/bridges digits_openenv:app --port 8000
"""

from __future__ import annotations

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

TURNS, WANTED = 2, "02468"
SIZES = {"train": 240, "test": 16}


class Say(Action):
    text: str


class Asked(Observation):
    question: str


class Digits(Environment[Say, Asked, State]):
    """Asks twice; each reply is worth the share of its characters that are even digits, halved."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number, self._step = 0, 0

    def list_splits(self) -> list[str]:
        return list(SIZES)

    def list_tasks(self, split: str) -> list[dict[str, str]]:
        return [{"id": f"{split}-{index}"} for index in range(SIZES[split])]

    def num_tasks(self, split: str) -> int:
        return SIZES[split]

    def reset(self, seed=None, episode_id=None, split="train", index=None, **_) -> Asked:
        self._number = (seed or 0) if index is None else index + (split == "test") * SIZES["train"]
        self._step = 0
        return Asked(question=str(self._number))

    def step(self, action: Say, timeout_s=None, **_) -> Asked:
        self._step += 1
        share = sum(character in WANTED for character in action.text) / max(len(action.text), 1)
        done = self._step == TURNS
        return Asked(question=str(self._number), reward=share / TURNS, done=done, metadata={"length": len(action.text)})

    @property
    def state(self) -> State:
        return State(step_count=self._step)


app = create_fastapi_app(Digits, Say, Asked, max_concurrent_envs=8, env_name="digits")
