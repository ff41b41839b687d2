"""Environments of the package verifiers: tools, a game of several turns, their rewards, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
from scripted_episodes import call, chat_tokenizer, parts, play

from jaxtune.config.schema import Config, RolloutOptions
from jaxtune.errors import UserError
from jaxtune.rollout.episodes.toolbox import load_functions

COVERS = ("jaxtune/rollout/episodes",)
pytest.importorskip("verifiers.envs", reason="needs verifiers 0.3: pip install 'jaxtune[verifiers]'")
CODE = '''
import verifiers as vf
from datasets import Dataset

ROWS = Dataset.from_list([{"question": "3 + 4?", "answer": "7"}])


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def right(completion, answer, **kwargs):
    return float(completion[-1].content == answer)


def sums():
    return vf.ToolEnv(tools=[add], dataset=ROWS, rubric=vf.Rubric(funcs=[right]), system_prompt="Add.")


class Guess(vf.MultiTurnEnv):
    """The reward is the share of answers that are left."""

    async def setup_state(self, state):
        state["secret"] = int(state["answer"])
        return state

    async def env_response(self, messages, state, **kwargs):
        guess = int(messages[-1].content)
        if guess == state["secret"]:
            state["final_env_response"] = [vf.UserMessage(content="right")]
            return state["final_env_response"]
        return [vf.UserMessage(content="higher" if guess < state["secret"] else "lower")]


def left(state, **kwargs):
    return 1 - len(state["trajectory"]) / 4


guess = Guess(dataset=ROWS, rubric=vf.Rubric(funcs=[left]), max_turns=3)


def mean(rewards_of_group, states, **kwargs):
    return [0.0 for _ in states]


def of_groups():
    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[mean]))
'''


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def file(tmp_path) -> Path:
    (tmp_path / "own.py").write_text(CODE)
    return tmp_path / "own.py"


def rows_of(environment) -> list[dict]:
    return [dict(row) for row in environment.get_dataset()]


def test_tools(tokenizer, file):
    options = RolloutOptions((f"{file}:sums",), environment=f"{file}:sums", max_new_tokens=500)
    kind = load_functions(Config(rollout=options)).toolbox.environments[None]
    (row,) = rows_of(kind.pool[0]._environment)
    script = [[call("add", '{"a": 3, "b": 4}'), "7<|im_end|>"], ["8<|im_end|>"]]
    (episode, other), _, made = play(tokenizer, options, [row, row], script)
    shown = tokenizer.decode(episode.prompt.tokens)
    assert "Add." in shown and "3 + 4?" in shown and '"name": "add"' in shown
    assert "<tool_response>\n7\n</tool_response>" in parts(tokenizer, episode)[1][0]
    assert not episode.failed and made.rewards.tolist() == [1, 0]
    assert [message["role"] for message in episode.messages] == ["assistant", "tool", "assistant"]
    assert [message["role"] for message in other.messages] == ["assistant"]


def test_a_game_of_several_turns(tokenizer, file):
    """Its own limit on turns, an error in it, and the limits of the run."""
    row = {"prompt": [{"role": "user", "content": "Guess."}], "answer": "5", "example_id": 0}
    script = [["3<|im_end|>", "5<|im_end|>"], ["1<|im_end|>"] * 3, ["no number<|im_end|>"]]
    options = RolloutOptions((f"{file}:guess",), environment=f"{file}:guess", max_new_tokens=400)
    episodes, _, made = play(tokenizer, options, [row] * 3, script)
    assert parts(tokenizer, episodes[0])[1][0].count("higher") == 1
    assert made.rewards.tolist() == pytest.approx([0.5, 0.25, np.nan], nan_ok=True)
    assert [episode.failed for episode in episodes] == [False, False, True]
    options = RolloutOptions((f"{file}:guess",), environment=f"{file}:guess", max_new_tokens=400, max_turns=1)
    _, _, made = play(tokenizer, options, [row], [["3<|im_end|>"]])
    assert made.rewards.tolist() == [0.75], "scored as it is"


def test_rewards_of_whole_groups_are_refused(file):
    with pytest.raises(UserError, match="a reward function of whole groups"):
        load_functions(Config(rollout=RolloutOptions((f"{file}:of_groups",), environment=f"{file}:of_groups")))
