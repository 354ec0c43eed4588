"""Modules that misbehave before a task is there, each in one way; written to files by the tests."""

GOOD = """
from megatron_rl.environments.base import Environment
from megatron_rl.types import Task

class Made(Environment):
    "Is fine."
    name = "NAME"
    def __init__(self, *, size: int = 2):
        pass
    def tasks(self, split):
        yield Task(id=split, prompt="2+2=")
    def grade(self, task, transcript):
        return 0.0
"""

WILD = {
    "sleeps": ("import time; time.sleep(600)\n" + GOOD, "took more than 2 s while its module was imported"),
    "exits": ("import os; os._exit(0)", "ended the process with status 0 while its module was imported"),
    "interrupts": (
        "raise KeyboardInterrupt",
        "raised KeyboardInterrupt (interrupts.py:1) while its module was imported; fix it, or leave it out",
    ),
    "own_kind": (
        "class Odd(BaseException): pass\nraise Odd('x' * 10**6)",
        "raised Odd: xxxx",
    ),
    "crashes": ("import ctypes; ctypes.string_at(0)", "was killed by SIGSEGV while its module was imported"),
    "aborts": ("import os; os.abort()", "was killed by SIGABRT while its module was imported"),
    "floods": (
        "import sys\nwhile True: sys.stderr.write('flood ' * 10000)",
        "printed more than 16 MiB while its module was imported",
    ),
    "closes": ("import os, time\nos.closerange(3, 65536)\ntime.sleep(600)", "closed the files of its process while"),
    "forks": (
        "import os, time\nif os.fork() == 0: time.sleep(600)\nos._exit(3)",
        "ended the process with status 3 while its module was imported",
    ),
    "constructs": (GOOD.replace("pass", "while True: pass"), "took more than 2 s while it was set up"),
    "quits_listing": (
        GOOD.replace("yield Task", "import os; os._exit(0); yield Task"),
        "ended the process with status 0 while its train tasks were read",
    ),
}
"""Source, and what the line about it says."""
