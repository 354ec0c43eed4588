"""A fork behaves as a Python process that was started with the same arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forks import Fork, run_python

TELL = (
    "import json, os, sys; print(json.dumps([sys.argv, sys.path[0], os.getcwd(), os.environ.get('MARK'), __name__]));"
    " print('aside', file=sys.stderr); sys.exit(len(sys.argv))"
)


def _kinds(folder: Path) -> list[list[str]]:
    (folder / "told.py").write_text(TELL)
    return [["-c", TELL, "x"], ["-m", "told", "x", "y"], ["told.py", "x"], [str(folder / "told.py")]]


@pytest.mark.parametrize("kind", range(4))
def test_a_command_sees_what_it_would_see(tmp_path: Path, kind: int) -> None:
    argv, env = _kinds(tmp_path)[kind], os.environ | {"MARK": "seen"}
    real = subprocess.run([sys.executable, *argv], env=env, cwd=tmp_path, capture_output=True, text=True)
    fork = run_python(*argv, env=env, cwd=tmp_path)
    assert fork.returncode == real.returncode
    assert json.loads(fork.stdout) == json.loads(real.stdout)
    assert fork.stderr == real.stderr == "aside\n"


def test_a_traceback_ends_it_with_one() -> None:
    ended = run_python("-c", "raise ValueError('seen')")
    assert ended.returncode == 1
    assert ended.stderr.endswith("ValueError: seen\n")


def test_its_end_waits_for_threads_and_calls_what_is_registered() -> None:
    ended = run_python(
        "-c",
        "import atexit, sys, threading, time; atexit.register(print, 'registered');"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start(); sys.exit('one line')",
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "thread\nregistered\n", "one line\n")


def test_what_it_changes_is_not_seen_by_the_next() -> None:
    assert run_python("-c", "import os, torch; os.environ['A'] = torch.mark = 'x'").returncode == 0
    later = run_python("-c", "import os, torch; print('A' in os.environ, hasattr(torch, 'mark'))")
    assert later.stdout == "False False\n"


def test_a_deadline_and_a_kill_end_it() -> None:
    with open(os.devnull, "wb") as nowhere:
        fork = Fork(["-c", "import time; time.sleep(600)"], os.environ, nowhere, nowhere)
        with pytest.raises(subprocess.TimeoutExpired):
            fork.wait(0.01)
        fork.kill()
        assert fork.wait(60) == -9
        fork.kill()  # nobody else's


def test_ranks_differ_in_their_hashes_and_spawned_processes_know_the_main_module(tmp_path: Path) -> None:
    with open(os.devnull, "wb") as nowhere:
        for rank in range(2):
            code = f"open({str(tmp_path / str(rank))!r}, 'w').write(str(hash('a word')))"
            assert Fork(["-c", code], os.environ, nowhere, nowhere, rank).wait(60) == 0
    assert (tmp_path / "0").read_text() != (tmp_path / "1").read_text()
    (tmp_path / "spawns.py").write_text(
        "from multiprocessing import get_context\n"
        "def answer(): raise SystemExit(7)\n"
        "if __name__ == '__main__':\n"
        "    child = get_context('spawn').Process(target=answer)\n"
        "    child.start(); child.join(); raise SystemExit(child.exitcode)\n"
    )
    assert run_python("-m", "spawns", cwd=tmp_path).returncode == 7
