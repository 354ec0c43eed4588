"""Harnesses for the tests of their workers: they do what a task's data says."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import time
from pathlib import Path

from megatron_rl.environments.base import HarnessEnvironment
from megatron_rl.environments.sandbox import run_python
from megatron_rl.types import Grade, Task


class Talk(HarnessEnvironment):
    """Asks the model, and is paid what it says; ``data["fault"]`` goes wrong first."""

    name = "talk"
    run_deadline = 120.0

    def __init__(self, *, bonus: float = 0.0) -> None:
        self._bonus = bonus
        self.made_in, self.saw = os.getpid(), os.getcwd()

    def tasks(self, split):
        yield Task(f"{split}-0", "?", {"fault": ""})

    def run(self, task, client):
        fault = task.data["fault"]
        if fault:
            return FAULTS[fault](self, task, client)
        return float(say(client, task.prompt)) + self._bonus


class Awaits(HarnessEnvironment):
    """Asks twice at once, with an asynchronous client."""

    name = "awaits"

    def tasks(self, split):
        yield Task(f"{split}-0", "?")

    async def run(self, task, client):
        messages = [{"role": "user", "content": task.prompt}]
        calls = (client.chat.completions.create(model="policy", messages=messages) for _ in range(2))
        answers = await asyncio.gather(*calls)
        return sum(float(answer.choices[0].message.content) for answer in answers)


def say(client, text: str) -> str:
    """The model's answer."""
    answer = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}])
    return answer.choices[0].message.content


def _raise(self, task, client):
    raise ValueError(f"no luck with {client.api_key}")


def _quote(self, task, client):
    """In a message that is cut amid the key."""
    raise ValueError("x" * (2000 - len("ValueError: key")) + client.api_key)


def _extract(self, task, client):
    return Grade(1.0, status="long", extracted="x" * (500 - len("key")) + client.api_key)


def _kill(self, task, client):
    os.kill(os.getpid(), 9)


def _exit(self, task, client):
    os._exit(7)


def _count(self, task, client):
    """Says that it ran, and dies."""
    with open(task.data["mark"], "a") as mark:
        mark.write("ran\n")
    os._exit(1)


def _sleep(self, task, client):
    """Holds the only process for longer than the deadline of the sample that waits for it."""
    Path(task.data["mark"]).touch()
    time.sleep(7.0)
    return 1.0


def _together(self, task, client):
    """How many run at once, by files in one folder."""
    mark = Path(task.data["mark"]) / str(os.getpid())
    mark.touch()
    time.sleep(0.5)
    count = len(list(mark.parent.iterdir()))
    mark.unlink()
    return float(count)


def _memory(self, task, client):
    kept = bytearray(2**40)
    return float(len(kept))


def _hang(self, task, client):
    mark = Path(task.data["mark"])
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    mark.write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)


def launch() -> int:
    """A daemon, started as a browser's launcher does: its parent has ended."""
    options = "stdout=-3, stderr=-3, start_new_session=True"
    script = f"import subprocess; print(subprocess.Popen(['sleep', '600'], {options}).pid)"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return int(shown.stdout)


def _daemon(self, task, client):
    """Leaves a daemon behind."""
    Path(task.data["mark"]).write_text(str(launch()))
    return 1.0


def _keeps(self, task, client):
    """Has a daemon, which must still be there when another sample has ended."""
    mark, daemon = Path(task.data["mark"]), launch()
    mark.write_text(str(daemon))
    while mark.exists():
        time.sleep(0.02)
    return float(Path(f"/proc/{daemon}").exists())


def _files(self, task, client):
    Path("left").mkdir()
    Path("left/behind").write_text("x")
    Path("left").chmod(0)
    Path(task.data["mark"]).write_text(os.getcwd())
    same = os.getcwd() == os.environ["HOME"] == os.environ["TMPDIR"]
    return float(same and self.saw == task.data["cwd"])


def _place(self, task, client):
    """Where it was set up, and what other samples' keys can be seen."""
    requests = [each for each in gc.get_objects() if isinstance(each, dict) and isinstance(each.get("client"), dict)]
    keys = {each["client"].get("api_key") for each in requests}
    assert client.api_key in keys  # else this looks in the wrong place
    others = keys - {client.api_key}
    shown = " ".join([*os.environ.values(), *Path("/proc/self/cmdline").read_text().split("\0")])
    seen = len(others) + (client.api_key in shown)
    own, patient = self.made_in == os.getpid(), client.timeout is None
    return Grade(1.0, {"own": float(own), "seen": float(seen), "patient": float(patient)})


def _sandbox(self, task, client):
    """Runs what the model says."""
    return float(run_python(f"print({say(client, 'code')} + 1)").stdout)


def _live(self, task, client):
    """Keeps a process from one call of the model to the next."""
    with subprocess.Popen([sys.executable, "-ic", ""], stdin=-1, stdout=-1, stderr=-3, text=True) as python:
        for _ in range(3):
            python.stdin.write(say(client, "next line") + "\n")
            python.stdin.flush()
        return float(python.stdout.readline())


FAULTS = {
    "raise": _raise,
    "quote": _quote,
    "extract": _extract,
    "kill": _kill,
    "exit": _exit,
    "memory": _memory,
    "count": _count,
    "sleep": _sleep,
    "together": _together,
    "hang": _hang,
    "daemon": _daemon,
    "keeps": _keeps,
    "files": _files,
    "place": _place,
    "sandbox": _sandbox,
    "live": _live,
    "nan": lambda *_: float("nan"),
    "text": lambda *_: "much",
    "none": lambda *_: None,
    "quit": lambda *_: sys.exit(3),
}


class Turns(Talk):
    """Claims to have turns."""

    name = "turns"
    max_turns = 4


class Inside(Talk):
    """Claims to need no process."""

    name = "inside"
    in_process = True


class Endless(Talk):
    """Has no deadline."""

    name = "endless"
    run_deadline = float("inf")


class Careless(Talk):
    """Cannot read an empty answer, and asks more often than its script says."""

    name = "careless"

    def run(self, task, client):
        return min(float(say(client, task.prompt)), float(say(client, task.prompt)))

    def gold_turns(self, task):
        return ["1"]


class Missing(HarnessEnvironment):
    """Has no run."""

    name = "missing"

    def tasks(self, split):
        return ()
