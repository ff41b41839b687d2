"""Users' reward functions: found by name, called as TRL calls them, and their results checked."""

import re

import numpy as np
import pytest
from tiny import byte_tokenizer

from jaxtune.data.formats.prompts import Prompt
from jaxtune.errors import UserError
from jaxtune.rollout.rewards import MADE_UP, load_rewards, rewards_of, total, try_rewards

IDS = [[1, 2], [3]]


@pytest.fixture
def file(tmp_path):
    """Write rewards.py; return a function that gives the name of a reward function in it."""

    def write(text: str, name: str = "rewards.py"):
        (tmp_path / name).write_text(text)
        return lambda function: f"{tmp_path / name}:{function}"

    return write


@pytest.fixture
def one(file):
    """Return the rewards of a function `r` with this body, for two completions of text."""

    def values(body: str, **columns):
        named = file(f"def r(prompts, completions, **columns):\n    {body}\n")
        return rewards_of(load_rewards([named("r")]), ["p", "q"], ["a", "bb"], IDS, columns)[:, 0].tolist()

    return values


def test_each_function_is_a_column_and_none_is_nan(file):
    named = file(
        "def length(completions, **columns): return [len(text) for text in completions]\n"
        "def right(completions, answer, **columns):\n"
        "    return [None if a is None else a == c for a, c in zip(answer, completions)]\n"
    )
    functions = load_rewards([named("right"), named("length")])
    assert list(functions) == ["right", "length"]
    values = rewards_of(functions, ["p", "p"], ["a", "bb"], IDS, {"answer": ["a", None]})
    assert values.dtype == np.float64
    np.testing.assert_array_equal(values, [[1, 1], [np.nan, 2]])


def test_functions_are_called_with_prompts_completions_their_tokens_and_columns_by_name(file):
    named = file("SEEN = []\ndef r(**given):\n    SEEN.append(given)\n    return [0, 0]\n")
    functions = load_rewards([named("r")])
    messages = [{"role": "user", "content": "p"}]
    rewards_of(functions, [messages, "q"], ["a", "bb"], IDS, {"answer": [7, 8]})
    assert functions["r"].function.__globals__["SEEN"] == [
        {
            "prompts": [messages, "q"],
            "completions": [[{"role": "assistant", "content": "a"}], "bb"],
            "completion_ids": IDS,
            "answer": [7, 8],
        }
    ]


def test_what_a_function_does_to_its_lists_is_not_seen_by_the_next(file):
    named = file(
        "def clears(completions, **columns):\n    completions.clear()\n    return [0, 0]\n"
        "def counts(completions, **columns): return [len(completions)] * 2\n"
    )
    functions = load_rewards([named("clears"), named("counts")])
    assert rewards_of(functions, ["p", "q"], ["a", "b"], IDS, {})[:, 1].tolist() == [2, 2]


def test_a_file_runs_once_and_may_define_dataclasses_and_callable_objects(file, tmp_path):
    named = file(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        f"open({str(tmp_path / 'runs')!r}, 'a').write('.')\n"
        "@dataclass\nclass Constant:\n    value: float\n"
        "    def __call__(self, completions, **columns): return [self.value] * len(completions)\n"
        "one, two = Constant(1.0), Constant(2.0)\n"
    )
    functions = load_rewards([named("one"), named("two")])
    assert rewards_of(functions, ["p"], ["a"], [[1]], {}).tolist() == [[1, 2]]
    assert (tmp_path / "runs").read_text() == "."


@pytest.mark.parametrize(
    "body, expected",
    [
        ("return (True, 0.5)", [1, 0.5]),
        ("import numpy; return numpy.array([1, 2], 'float32')", [1, 2]),
        ("return (len(c) for c in completions)", [1, 2]),
    ],
    ids=["tuple", "array", "generator"],
)
def test_numbers_of_any_kind_are_taken(one, body, expected):
    assert one(body) == expected


@pytest.mark.parametrize(
    "body, message",
    [
        ("return 1 / 0", r"rewards\.py:2: r fails: ZeroDivisionError: division by zero"),
        ("return [1]", r"rewards\.py: r returned 1 values for 2 completions; it must return one for each"),
        ("pass", r"r must return a list with a number for each completion, not None"),
        ("return '10'", r"r must return a list with a number for each completion, not '10'"),
        ("return ['1', 0]", r"r returned '1' for completion 0; it must be a finite number, or None"),
        ("return [0, [1]]", r"r returned \[1\] for completion 1; it must be a finite number, or None"),
        ("return [0, float('nan')]", r"r returned nan for completion 1; it must be a finite number, or None"),
        ("return [0, 10**400]", r"r returned 1000.* for completion 1; it must be a finite number, or None"),
    ],
    ids=["raises", "count", "nothing", "text", "text-value", "list-value", "nan", "too-large"],
)
def test_what_is_no_reward_is_refused_and_the_function_named(one, body, message):
    with pytest.raises(UserError, match=message):
        one(body)


def test_an_error_names_the_last_line_of_their_file_and_keeps_its_cause(file):
    named = file(
        "import json\ndef inner(text):\n    return json.loads(text)\ndef r(completions, **c):\n    inner('{')\n"
    )
    with pytest.raises(UserError, match=r"rewards\.py:3: r fails: JSONDecodeError") as caught:
        rewards_of(load_rewards([named("r")]), ["p"], ["a"], [[1]], {})
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_column_that_the_data_lacks_is_said_with_those_it_has(file):
    functions = load_rewards([file("def r(answer, **columns): return []\n")("r")])
    message = r"missing 1 required .*'answer' \(it was passed prompts, completions, completion_ids, label\)"
    with pytest.raises(UserError, match=message):
        rewards_of(functions, ["p"], ["a"], [[1]], {"label": [1]})


def test_a_column_cannot_have_the_name_of_what_is_passed(one):
    with pytest.raises(UserError, match="the data has a column 'completions'.*rename it"):
        one("return [0, 0]", completions=["x", "y"])


@pytest.mark.parametrize(
    "text, message",
    [
        ("async def r(**columns): ...", "r is async, which is not supported; write it with `def`"),
        ("class R:\n    async def __call__(self, **columns): ...\nr = R()", "r is async"),
        ("def r(completions): ...", r"r must take \*\*columns as its last parameter: it is passed prompts, compl"),
        ("r = 3", "has no function r"),
        ("x = 1\n1 / 0", r"rewards\.py:2 fails: ZeroDivisionError"),
    ],
    ids=["async", "async-object", "columns", "no-function", "fails"],
)
def test_what_cannot_be_called_is_refused_before_anything_is_generated(file, text, message):
    with pytest.raises(UserError, match=message):
        load_rewards([file(text)("r")])


@pytest.mark.parametrize("name", ["rewards.r", "rewards.py", "rewards.py:"])
def test_a_function_is_named_by_file_and_name(name):
    with pytest.raises(UserError, match=rf"rewards='{re.escape(name)}' is not FILE.py:NAME"):
        load_rewards([name])


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"there is no file .*absent\.py"):
        load_rewards([f"{tmp_path}/absent.py:r"])


def test_two_functions_of_one_name_are_refused(file):
    text = "def r(**columns): ...\n"
    with pytest.raises(UserError, match=r"two functions are called r \(.*a\.py and .*b\.py\); rename one"):
        load_rewards([file(text, "a.py")("r"), file(text, "b.py")("r")])


def test_the_total_weighs_what_is_said():
    values = np.array([[1.0, 2.0], [np.nan, 2.0], [np.nan, np.nan]])
    assert total(values, [10.0, 1.0])[:2].tolist() == [12.0, 2.0]
    assert np.isnan(total(values, [10.0, 1.0])[2])


def test_a_function_may_be_in_a_module():
    right = load_rewards(["jaxtune.recipes.qwen_grpo:right"])
    arguments = {"prompts": ["1 + 1", "2 + 2", "3 + 3"], "completions": ["it is 1,002.", "5", "none"]}
    rewards = rewards_of(
        right, **arguments, completion_ids=[[1]] * 3, columns={"answer": ["1 #### 1002", "#### 4", "#### 6"]}
    )
    assert rewards.tolist() == [[1.0], [0.0], [0.0]]
    with pytest.raises(UserError, match="Python finds no module nowhere.at_all; a file is named with its .py"):
        load_rewards(["nowhere.at_all:f"])


def test_a_module_is_imported_as_one(tmp_path, monkeypatch):
    """Therefore it can import its neighbours; two files of one name are two modules."""
    package = tmp_path / "own_rewards"
    package.mkdir()
    for name, text in (("__init__", ""), ("util", "ONE = 1.0\n")):
        (package / f"{name}.py").write_text(text)
    text = "from .util import ONE\ndef r(prompts, **columns):\n    return [ONE] * len(prompts)\n"
    (package / "rewards.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = {"prompts": ["a"], "completions": ["b"], "completion_ids": [[1]], "columns": {}}
    assert rewards_of(load_rewards(["own_rewards.rewards:r"]), **arguments).tolist() == [[1.0]]


def test_functions_are_tried_on_a_whole_group_of_the_first_prompt(file, tmp_path):
    named = file(
        "SEEN = []\n"
        "def r(prompts, completions, completion_ids, answer, **columns):\n"
        "    SEEN.append((prompts, completions, answer, len(completion_ids[0]) > 0))\n"
        "    return [None] * len(completions)\n"
        "def wrong(completions, **columns): return {'score': 1}\n"
        "def lacks(completions, solution, **columns): return [0.0] * len(completions)\n"
    )
    prompt, tokenizer = Prompt("1+1", [1], {"answer": "2"}), byte_tokenizer(tmp_path)
    functions = load_rewards([named("r")])
    try_rewards(functions, prompt, tokenizer, 3)
    assert functions["r"].function.__globals__["SEEN"] == [(["1+1"] * 3, [MADE_UP] * 3, ["2"] * 3, True)]
    tried = r"\(tried before the first step, on the first prompt with 3 completions 'The answer is 1.'\)$"
    with pytest.raises(UserError, match="wrong must return a list with a number for each completion, not .*" + tried):
        try_rewards(load_rewards([named("wrong")]), prompt, tokenizer, 3)
    with pytest.raises(UserError, match="lacks fails: TypeError: .*'solution'.*" + tried):
        try_rewards(load_rewards([named("lacks")]), prompt, tokenizer, 3)
