"""Whatever a module does while it is loaded costs it one line, and nobody else anything."""

from __future__ import annotations

import psutil
import pytest

from megatron_rl.environments.child import KEPT_OUTPUT
from megatron_rl.environments.loading import list_environments, self_test, survey_list
from megatron_rl.environments.process import EnvironmentServerProcess
from megatron_rl.errors import ConfigError, EnvironmentFault
from tests.unit.environments.wild_modules import GOOD, WILD


@pytest.fixture
def wild(tmp_path, monkeypatch):
    """A folder of importable modules: the wild ones and a good one, and a list of them all."""
    for name, (source, _) in {**WILD, "good_x": (GOOD, "")}.items():
        (tmp_path / f"{name}.py").write_text(source.replace("NAME", name))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_each_wild_module_of_a_list_gets_its_line(wild, monkeypatch, capfd):
    monkeypatch.setattr("megatron_rl.environments.child.MAX_FAILURES", len(WILD))
    path = wild / "list.yaml"
    path.write_text("".join(f"- environment: {name}:Made\n" for name in ["good_x", *WILD]))
    with pytest.raises(ConfigError) as error:
        survey_list(path, seconds=2.0)
    problems = error.value.lines
    assert len(problems) == len(WILD)
    for line, (name, problem) in enumerate(zip(WILD, problems, strict=True), start=2):
        assert problem.startswith(f"{path}:{line}: environment '{name}")
        assert WILD[name][1] in problem
        assert "\n" not in problem and len(problem) < 1200
    assert capfd.readouterr() == ("", "")
    assert not [child for child in psutil.Process().children(recursive=True) if "loading" in str(child.cmdline())]


def test_a_list_that_is_sound_is_surveyed(wild):
    (wild / "list.yaml").write_text(
        "- {environment: good_x:Made, name: a}\n"
        "- {environment: arithmetic, args: {train_tasks: 4, test_tasks: 3}, evaluation_only: true}\n"
    )
    one, two = survey_list(wild / "list.yaml", seconds=60.0, demonstrations=True)
    assert (one.name, one.evaluation_only, one.test_tasks, one.first_chat) == ("a", False, 1, None)
    assert (two.name, two.evaluation_only, two.test_tasks, two.demonstrates) == ("arithmetic", True, 3, False)


def test_problems_of_other_entries_are_told_beside_a_wild_one(wild):
    (wild / "list.yaml").write_text("- environment: exits:Made\n- environment: arithmatic\n")
    with pytest.raises(ConfigError) as error:
        survey_list(wild / "list.yaml", seconds=60.0)
    assert "ended the process with status 0" in error.value.lines[0]
    assert "did you mean 'arithmetic'" in error.value.lines[1]


def test_the_self_test_of_a_wild_environment_is_one_line(wild):
    inspection = self_test("crashes:Made", [], 10, seconds=60.0)
    assert inspection.problems == (
        "environment 'crashes:Made' was killed by SIGSEGV while its module was imported; fix it, or leave it out",
    )


def test_a_grader_that_ends_the_process_is_named(wild):
    source = GOOD.replace("NAME", "graceless").replace("return 0.0", "import os; os._exit(0)")
    (wild / "graceless.py").write_text(source)
    [problem] = self_test("graceless:Made", [], 10, seconds=60.0).problems
    assert "ended the process with status 0 while it graded '' to task 'train'" in problem


def test_output_is_kept_in_part(wild):
    (wild / "talks.py").write_text("print('a' * 10**6 + 'the end')\n" + GOOD.replace("NAME", "talks"))
    inspection = self_test("talks:Made", ["size=3"], 10, seconds=60.0)
    assert inspection.problems == ()
    assert inspection.output.rstrip().endswith("the end")
    assert len(inspection.output) <= KEPT_OUTPUT


def test_wild_modules_do_not_hide_the_others(wild):
    info = wild / "wild-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wild\nVersion: 1.0\n")
    (wild / "raises.py").write_text("1 / 0")
    (wild / "odd.py").write_text(GOOD.replace("NAME", "odd") + "    description = classmethod(lambda cls: 7)\n")
    names = ("exits", "good_x", "interrupts", "odd", "raises")
    points = "".join(f"{name} = {name}:Made\n" for name in names)
    (info / "entry_points.txt").write_text(f"[megatron_rl.environments]\n{points}")
    environments, broken = list_environments(seconds=60.0)
    assert environments["good_x"] == "Is fine."
    assert environments["odd"] == "7"
    assert "arithmetic" in environments
    end = " while it was imported; fix it, or leave it out"
    assert list(broken) == ["exits", "interrupts", "raises"]
    assert broken["exits"][0] == f"environment 'exits' ended the process with status 0{end}"
    assert broken["interrupts"][0] == f"environment 'interrupts' raised KeyboardInterrupt (interrupts.py:1){end}"
    problem, trace = broken["raises"]
    assert problem == "cannot be imported: ZeroDivisionError: division by zero (raises.py:1)"
    assert "Traceback" in trace


def test_a_server_that_a_module_ends_leaves_the_modules_name(wild):
    """The preflight of rank 0 has looked at the list; on another node the module may do something else."""
    (wild / "list.yaml").write_text("- environment: good_x:Made\n- environment: exits:Made\n")
    with pytest.raises(EnvironmentFault) as fault, EnvironmentServerProcess(wild / "list.yaml", wild / "logs"):
        pass
    first, line = str(fault.value).splitlines()
    assert first.startswith("the environment server exited (0) while it started; see ")
    assert line.endswith(f"{wild / 'list.yaml'}:2, now loading: environment 'exits:Made' (its module was imported)")
