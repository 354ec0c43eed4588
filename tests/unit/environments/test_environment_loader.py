"""Discovery: folder, entry points and module:Class, with broken environments among them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.environments.loader import PACKAGE, discover, find_environment, reason_of
from megatron_rl.errors import ConfigError

GOOD = """
from megatron_rl.environments.base import Environment

class Good(Environment):
    \"\"\"Is {name}.\"\"\"
    name = "{name}"
    def tasks(self, split): return ()
    def grade(self, task, transcript): return 0.0
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Puts a package of that name on the path beside the library, as a wheel installs both."""
    monkeypatch.setattr("megatron_rl.__file__", str(tmp_path / "megatron_rl" / "__init__.py"))
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / PACKAGE
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "good.py").write_text(GOOD.format(name="good"))
    (folder / "_helper.py").write_text("raise RuntimeError('helpers are not environments')")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


def test_the_folder_beside_the_library_is_found():
    assert "arithmetic" in discover()[0]


def test_an_installed_package_is_found(installed):
    assert list(discover()[0]) == ["good"]


def test_the_checkout_that_runs_wins_over_an_installed_one(installed, monkeypatch, tmp_path):
    """One virtual environment for two checkouts: the installed package is the folder of the other."""
    assert find_environment("good").description() == "Is good."
    folder = tmp_path / "checkout" / "environments"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "good.py").write_text(GOOD.format(name="good").replace("Is good", "Is here"))
    monkeypatch.setattr("megatron_rl.__file__", str(tmp_path / "checkout" / "megatron_rl" / "__init__.py"))
    assert find_environment("good").description() == "Is here."
    assert find_environment(f"{PACKAGE}.good:Good").description() == "Is here."
    assert discover()[0]["good"].description() == "Is here."


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("import no_such_module_x", "No module named"),
        ("x = (", "SyntaxError"),
        ("raise SystemExit(1)", "SystemExit"),
        ("x = 1", "defines no Environment"),
        (
            "from megatron_rl.environments.base import HarnessEnvironment\n"
            "class Half(HarnessEnvironment):\n    name = 'half'\n    def tasks(self, split):\n        return ()\n",
            "'Half' lacks run",
        ),
        (GOOD.format(name="Not a name!"), "Not a name!"),
    ],
)
def test_a_broken_environment_does_not_hide_the_others(installed, source, shown):
    (installed / "broken.py").write_text(source)
    environments, broken = discover()
    assert list(environments) == ["good"]
    assert list(broken) == ["broken"]
    assert shown in reason_of(broken["broken"])
    assert find_environment("good").name == "good"
    with pytest.raises(ConfigError, match="environment 'broken' cannot be imported: ") as error:
        find_environment("Broken")
    assert shown in str(error.value)
    assert "\n" not in str(error.value)


def test_the_line_that_raised_is_named(installed):
    (installed / "broken.py").write_text("import json\n\njson.loads('{')\n")
    with pytest.raises(ConfigError, match=r"JSONDecodeError: .* \(broken\.py:3\)"):
        find_environment("broken")


def test_a_folder_may_hold_environments_of_other_names(installed):
    (installed / "pair.py").write_text(
        GOOD.format(name="left") + GOOD.format(name="right").replace("Good", "R")
    )
    assert list(discover()[0]) == ["good", "left", "right"]
    assert find_environment("rightAgent").name == "right"


def test_a_name_is_found_however_its_words_are_joined(installed):
    (installed / "word_count.py").write_text(GOOD.format(name="word_count"))
    for spelling in ("word_count", "WordCountAgent", "word-count", "examples.rl.word_count_agent.WordCountAgent"):
        assert find_environment(spelling).name == "word_count"


def test_entry_points_of_other_packages_are_found(installed, tmp_path):
    (tmp_path / "elsewhere.py").write_text(GOOD.format(name="elsewhere"))
    info = tmp_path / "elsewhere-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[megatron_rl.environments]\nelsewhere = elsewhere:Good\nlost = elsewhere:Lost\n"
    )
    environments, broken = discover()
    assert list(environments) == ["elsewhere", "good"]
    assert list(broken) == ["lost"]
    assert find_environment("elsewhere").description() == "Is elsewhere."


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("no_such_module_x:Class", "there is no module 'no_such_module_x'; it is looked for in /"),
        ("no_such_module_x.y:Class", "there is no module 'no_such_module_x'; "),
        ("json.no_such_module_x:Class", "there is no module 'json.no_such_module_x'; "),
        ("json.decoder.deeper:Class", "there is no module 'json.decoder.deeper'"),
        ("hostile_environments:", "'hostile_environments:' names no class; write package.module:Class"),
        (":Class", "':Class' names no class"),
        ("..module:Class", "'..module:Class' names no class"),
        ("..module", "unknown environment '..module'"),
        ("hostile_environments:Steady.name", "names no class"),
        ("a b:Class", "'a b:Class' names no class"),
        ("hostile_environments:Stedy", "did you mean 'Steady'"),
        ("pathlib:Path", "is not an Environment"),
        ("megatron_rl.environments.base:Environment", "lacks grade"),
        ("goood", "did you mean 'good'"),
        ("zzz", "known: good"),
        ("agent", "unknown environment 'agent'"),
    ],
)
def test_unknown_references(installed, hostile_path, reference, message):
    with pytest.raises(ConfigError, match=message) as error:
        find_environment(reference)
    assert "\n" not in str(error.value)


def test_a_module_of_the_current_directory_is_found(tmp_path, monkeypatch):
    """``python -m`` looks there and a script does not: a list that passes the test must train, too."""
    (tmp_path / "only_here_x.py").write_text(GOOD.format(name="only_here"))
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(Path.cwd()))])
    with pytest.raises(ConfigError, match="there is no module 'only_here_x'"):
        find_environment("only_here_x:Good")
    monkeypatch.chdir(tmp_path)
    assert find_environment("only_here_x:Good").name == "only_here"
    monkeypatch.delitem(sys.modules, "only_here_x")


def test_the_server_side_imports_no_torch():
    code = (
        "import sys, megatron_rl.environments.server, megatron_rl.environments.__main__\n"
        "from megatron_rl.environments.loader import discover\n"
        "assert discover()[0]\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'aiohttp')))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=False).returncode
        == 0
    )
