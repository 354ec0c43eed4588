"""The YAML list: both spellings, and everything that can be wrong with it."""

from __future__ import annotations

import pytest

from megatron_rl.chat import ChatFormat
from megatron_rl.environments.config import load_environment_specs
from megatron_rl.errors import ConfigError
from tests.unit.environments.conftest import problems_of


@pytest.fixture
def problems(tmp_path, hostile_path):
    """Writes a list and returns the problems it is refused with."""

    def load(text: str) -> list[str]:
        path = tmp_path / "list.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError) as error:
            load_environment_specs(path)
        return [problem.removeprefix(f"{path}:") for problem in error.value.lines]

    return load


def load(tmp_path, text):
    path = tmp_path / "list.yaml"
    path.write_text(text)
    return load_environment_specs(path)


def test_both_spellings_mean_the_same(tmp_path):
    [ours] = load(
        tmp_path,
        "- environment: arithmetic\n  args: {max_terms: 6}\n  weight: 2\n  evaluation_only: true\n",
    )
    [megatrons] = load(
        tmp_path,
        "- agent_type: ArithmeticAgent\n  agent_args: {max_terms: 6}\n  weight: 2.0\n"
        "  evaluation_only: true\n",
    )
    for spec in (ours, megatrons):
        assert (spec.name, spec.options, spec.weight) == ("arithmetic", {"max_terms": 6}, 2.0)
        environment = spec.create()
        assert environment.evaluation_only is True
        assert type(environment).evaluation_only is False


@pytest.mark.parametrize(
    "reference",
    [
        "arithmetic",
        "Arithmetic",
        "ArithmeticAgent",
        "megatron_rl_environments.arithmetic:Arithmetic",
        "examples.rl.environments.arithmetic_agent.ArithmeticAgent",
    ],
)
def test_references(tmp_path, reference):
    [spec] = load(tmp_path, f"- agent_type: {reference}\n  agent_args:\n")
    assert (spec.name, spec.options, spec.weight) == ("arithmetic", {}, 1.0)


def test_entries_of_one_environment_get_distinct_names(tmp_path):
    specs = load(
        tmp_path,
        "- {environment: arithmetic}\n"
        "- {environment: arithmetic, args: {seed: 1}}\n"
        "- {environment: arithmetic, args: {seed: 2}, name: arithmetic_2}\n"
        "- {environment: arithmetic, evaluation_only: true}\n",
    )
    assert [spec.name for spec in specs] == ["arithmetic", "arithmetic_3", "arithmetic_2", "arithmetic_4"]


def test_repeated_entries_and_names_are_refused(problems):
    [problem] = problems("- {environment: arithmetic}\n- {agent_type: ArithmeticAgent, weight: 3}\n")
    assert problem.startswith("2: repeats")
    [problem] = problems(
        "- {environment: arithmetic, name: a}\n- {environment: arithmetic, name: a, args: {seed: 1}}\n"
    )
    assert problem.startswith("2: has the name 'a' of")


def test_malformed_yaml_names_the_line(problems):
    [problem] = problems("- environment: arithmetic\n  weight: [1,\n- x\n")
    assert problem.startswith("3: not valid YAML")
    [problem] = problems("- environment: arithmetic\n  weight: 1\n   bad: 2\n")
    assert problem.startswith("3: not valid YAML")
    [problem] = problems("- environment: !!python/object/apply:os.getcwd []\n")
    assert problem.startswith("1: not valid YAML")
    assert "not valid YAML" in problems("- environment: \x00\n")[0]


@pytest.mark.parametrize("text", ["", "# nothing\n", "[]", "environment: arithmetic", "3", "null"])
def test_anything_but_a_list_is_refused(problems, text):
    assert "must be a list of environments" in problems(text)[0]


def test_all_problems_come_at_once_with_their_lines(problems):
    found = problems(
        "- environment: arithmatic\n"
        "- environment: arithmetic\n"
        "  wieght: 2\n"
        "  weight: -1\n"
        "  evaluation_only: 1\n"
        "  args: {max_term: 3, seed: '1'}\n"
        "- weight: 1\n"
        "- 7\n"
    )
    assert found[0] == "1: unknown environment 'arithmatic'; did you mean 'arithmetic'?"
    assert found[1] == "2: unknown key 'wieght'; did you mean 'weight'?"
    assert found[2].startswith("2: weight is -1")
    assert found[3].startswith("2: evaluation_only is 1")
    assert found[4].startswith("2: arithmetic has no option 'max_term'; did you mean 'max_terms'")
    assert found[5] == "2: option 'seed' of arithmetic is '1'; it must be of type int"
    assert found[6] == "7: no environment is named; add 'environment: NAME'"
    assert found[7].startswith("8: an entry must be a mapping")


@pytest.mark.parametrize("weight", ["-0.1", ".nan", ".inf", "true", "heavy", "null"])
def test_bad_weights(problems, weight):
    [problem] = problems(f"- environment: arithmetic\n  weight: {weight}\n")
    assert problem.startswith("1: weight is")


@pytest.mark.parametrize("name", ["eval_prompts", "eval_samples"])
@pytest.mark.parametrize("value", ["0", "1.5", "true", "1000001"])
def test_bad_sizes_of_an_evaluation(problems, name, value):
    [problem] = problems(f"- environment: arithmetic\n  {name}: {value}\n")
    assert problem.startswith(f"1: {name} is ") and "it must be a whole number from 1 to 1" in problem


def test_the_keys_of_chats(tmp_path):
    template = tmp_path / "short.jinja"
    template.write_text("{{ messages }}")
    keys = f"  chat_template: {template}\n  chat_template_kwargs: {{thinking: false}}\n  system_prompt: ''\n"
    own, none = load(tmp_path, f"- environment: arithmetic\n{keys}- environment: gsm8k\n")
    assert own.chat == ChatFormat("{{ messages }}", {"thinking": False}, "")
    assert none.chat == ChatFormat()


@pytest.mark.parametrize(
    ("key", "fault"),
    [
        ("chat_template: none.jinja", "1: chat_template 'none.jinja' cannot be read (No such file or directory)"),
        ("chat_template: {default: a}", "1: chat_template is {'default': 'a'}; it must be the path of a file"),
        ("chat_template_kwargs: '{}'", "1: chat_template_kwargs is '{}'; give a JSON object"),
        ("chat_template_kwargs: {messages: []}", "1: chat_template_kwargs has 'messages', which is not for"),
        ("chat_template_kwargs: {day: 2020-01-01}", "1: chat_template_kwargs must be plain JSON values"),
        ("system_prompt: 3", "1: system_prompt is 3; it must be a text"),
    ],
)
def test_bad_keys_of_chats(problems, key, fault):
    [problem] = problems(f"- environment: arithmetic\n  {key}\n")
    assert problem.startswith(fault)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("- environment: arithmetic\n  weight: 1" + "0" * 400, "1: weight is 1000"),
        ("- environment: arithmetic\n  weight: 0x1" + "0" * 5000, "1: weight is <int with a number of thousands"),
        ("- environment: arithmetic\n  weight: 1.0e+400", "1: weight is inf; it must be from 0 to 1e+09"),
        ("- environment: arithmetic\n  grade_deadline: 1" + "0" * 400, "1: grade_deadline is 1000"),
        ("- environment: arithmetic\n  name: " + "x" * 10**5, "1: name is 'xxx"),
        ("- &a [*a]\n", "1: an entry must be a mapping such as 'environment: NAME', not [[[[[..."),
        ("- environment: arithmetic\n  args: {seed: &a [*a]}\n", "1: args is {'seed': [[[[...]]]]}; it must be"),
        ("- environment: arithmetic\n  args: {seed: 2020-01-01}\n", "1: args is {'seed': datetime.date(2020, 1, 1)};"),
        ("- environment: arithmetic\n  args: {seed: .nan}\n", "1: args is {'seed': nan}; it must be plain JSON"),
        ("- environment: nothing\n" * 40, "1: unknown environment 'nothing'"),
        ("- environment: " + "x" * 10**6, "1: unknown environment 'xxx"),
        ("# " + "x" * 2**20, "has more than 1 MiB"),
        ("- {environment: arithmetic, " + ", ".join(f"k{n}: 1" for n in range(1000)) + "}", "1: unknown key 'k0'"),
    ],
)
def test_a_hostile_list_gets_few_short_lines(problems, text, shown):
    found = problems(text)
    assert shown in found[0]
    assert len(found) <= 1001
    assert all(len(problem) <= 1000 and "\n" not in problem for problem in found)


def test_a_list_that_is_no_file_is_refused(tmp_path):
    for path in ("/dev/zero", tmp_path, "x" * 5000, "a\0b"):
        with pytest.raises(ConfigError, match=r"the environment list .* cannot be read \(") as error:
            load_environment_specs(path)
        assert len(str(error.value)) < 1000


def test_weights_of_training_entries_must_not_sum_to_zero(problems, tmp_path):
    [problem] = problems(
        "- {environment: arithmetic, weight: 0}\n- {environment: arithmetic, evaluation_only: true}\n"
    )
    assert "the weights sum to 0" in problem
    assert len(load(tmp_path, "- {environment: arithmetic, evaluation_only: true}\n")) == 1


def test_keys_given_twice_are_refused(problems):
    assert problems("- environment: arithmetic\n  weight: 1\n  weight: 2\n") == ["3: 'weight' is given twice"]
    [problem] = problems("- {environment: arithmetic, agent_type: Arithmetic}\n")
    assert "keep one" in problem


def test_keys_given_twice_are_refused_at_every_depth(problems):
    text = "- environment: arithmetic\n  args:\n    max_terms: 4\n    max_terms: 5\n"
    assert problems(text) == ["4: 'max_terms' is given twice"]
    assert problems("- environment: judge\n  args: {judge: {url: a, url: b}}\n") == ["2: 'url' is given twice"]


def test_merges_of_ordinary_size_are_read(tmp_path):
    first, second = load(
        tmp_path,
        "- &one {environment: arithmetic, weight: 2, args: &args {seed: 1}}\n"
        "- {<<: *one, args: {<<: *args, seed: 2}}\n",
    )
    assert (first.options, second.options, second.weight) == ({"seed": 1}, {"seed": 2}, 2.0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("arithmetic", "max_terms: 1000000000"),
        ("calculator", "max_terms: 1000000000"),
        ("countdown", "train_tasks: 1000000000"),
        ("countdown", "max_numbers: 1000000000"),
        ("shop", "goods: 1000000000"),
    ],
)
def test_sizes_that_no_memory_holds_are_refused_before_a_task_is_made(tmp_path, name, options):
    [spec] = load(tmp_path, f"- environment: {name}\n  args: {{{options}}}\n")
    with pytest.raises(ConfigError, match="cannot be set up with its options"):
        spec.create()


def test_operands_beyond_the_largest_total_are_not_drawn_for_ever(tmp_path):
    [spec] = load(tmp_path, "- environment: arithmetic\n  args: {max_operand: 1000000000, train_tasks: 3}\n")
    assert len(list(spec.create().tasks("train"))) == 3


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load_environment_specs(tmp_path / "absent.yaml")


def test_check_finds_nothing_wrong_with_the_example(tmp_path):
    (tmp_path / "list.yaml").write_text(
        "- {environment: arithmetic, args: {train_tasks: 64, test_tasks: 8}}\n"
    )
    assert problems_of(tmp_path / "list.yaml") == []


def test_check_walks_all_rows(tmp_path, hostile_path):
    path = tmp_path / "list.yaml"
    path.write_text(
        "- environment: hostile_environments:BadRows\n"
        "- environment: hostile_environments:NoTasks\n"
        "- {environment: arithmetic, args: {min_terms: 9}}\n"
    )
    found = problems_of(path)
    rows = [problem.removeprefix("bad_rows: train ") for problem in found if "bad_rows: train" in problem]
    assert rows[0] == "row 1 is a dict, not a Task; it lacks id, prompt; it has question, answer"
    assert rows[1] == "row 2 has the id 'a' of train row 0; ids must be unique"
    assert rows[2] == "row 3 has an empty prompt"
    assert rows[3] == "row 4 has the id ''; it must be a non-empty string"
    assert rows[4].startswith("row 5 has data 'gold' that is not JSON")
    assert rows[5] == "row 6 has data 'gold' that JSON does not return unchanged (tuple)"
    assert rows[6].startswith("row 7 has data 'gold' that is not JSON")
    assert rows[7] == "row 8 has a prompt in which prompt[0].content is missing; there is: role, text"
    assert rows[8] == "row 9 raises KeyError: 'answer'"
    assert any(problem.startswith("bad_rows: test row 0 has the id 'a' of train row 0") for problem in found)
    assert "no_tasks: there are no train tasks" in found
    assert found[-1] == (
        "arithmetic: arithmetic cannot be set up with its options: "
        "ValueError: 2 <= min_terms <= max_terms <= 100 must hold, got 9 and 5"
    )


def test_check_reports_what_the_list_is_refused_with(tmp_path):
    (tmp_path / "list.yaml").write_text("- environment: nothing\n")
    [problem] = problems_of(tmp_path / "list.yaml")
    assert "unknown environment 'nothing'" in problem
