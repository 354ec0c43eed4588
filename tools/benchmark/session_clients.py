"""The clients of `sessions`: a job as JSON on standard input, what came of it on standard output.

A file of its own, so that they begin without torch.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import openai

SAME_PROMPT = 8
"""Sessions that begin alike, as the samples of a group do."""
PROMPT, REPLY = 96, 16
"""Characters; a token each."""


async def _play(job: dict[str, Any]) -> dict[str, Any]:
    """Grades as ``[reward, code]``; when the first call was made, and when each was answered."""
    client = openai.AsyncOpenAI(api_key=job["runs"][0]["api_key"], max_retries=0)
    moments = [time.monotonic()]
    count = round(len(job["runs"]) * job["faulty"])
    grades = await asyncio.gather(*(
        _session(client.with_options(base_url=run["base_url"]), run, job, number if number < count else None, moments)
        for number, run in enumerate(job["runs"])
    ))
    return {"grades": grades, "moments": moments}


async def _session(
    client: Any, run: dict[str, Any], job: dict[str, Any], fault: int | None, moments: list[float]
) -> tuple[float | None, str]:
    prompt = f"{job['seed']}.{run['sample'] // SAME_PROMPT}:".ljust(PROMPT, "x")
    for turn in range(job["turns"]):
        if turn == 2 and fault is not None:
            if fault % 2:
                return None, "worker_died"
            await asyncio.sleep(job["deadline"])
            return None, "timeout"
        answer = await client.completions.create(model="policy", prompt=prompt)
        moments.append(time.monotonic())
        prompt += answer.choices[0].text + f"<{turn}>".ljust(REPLY, ".")
    return 1.0, ""


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(_play(json.load(sys.stdin)))))
