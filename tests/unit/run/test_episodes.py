"""Episodes: what is sampled, observed and trained, and what a tool or an environment that fails costs."""

import time
from pathlib import Path

import numpy as np
import pytest
from scripted_episodes import call, chat_tokenizer, parts, play
from tiny import byte_tokenizer

from jaxtune.config.schema import Config, RolloutOptions
from jaxtune.data.chat.chat_template import ChatTemplate
from jaxtune.data.chat.encoding import Encoder
from jaxtune.data.formats.prompts import Prompt
from jaxtune.errors import UserError
from jaxtune.rollout.episodes.toolbox import load_functions, try_functions
from jaxtune.rollout.groups import means

CODE = '''
import asyncio
import time


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first one.
        b: the second one.
    """
    return a + b


async def slow(seconds: float) -> str:
    """Wait.

    Args:
        seconds: for how long.
    """
    await asyncio.sleep(seconds)
    return "awake"


class Counter:
    """As TRL's environment_factory."""

    def reset(self, start, **row):
        if start < 0:
            raise ValueError("no start below 0")
        self.count = start
        return f" It is {start}."

    def increase(self, by: int) -> str:
        """Increase the counter.

        Args:
            by: by how much.
        """
        self.count += by
        return f"now {self.count}"

    def get_reward(self):
        return float(self.count)


class Guess:
    """A game of several turns."""

    def reset(self, secret, **row):
        self.secret = secret

    def step(self, answer):
        guess = int(answer["content"])
        if guess == self.secret:
            return None, 1.0, True
        if guess > 90:
            time.sleep(30)
        return ("higher" if guess < self.secret else "lower"), -0.1, False


def evaluate(function: str) -> str:
    """Evaluate a function.

    Args:
        function: the function.
    """
    return f"the value of {function}"


class Clerk:
    """Its rows have columns with names of parameters of jaxtune's own functions."""

    def reset(self, function, kind, text, **row):
        return text

    def step(self, answer):
        return None, {"good": 1.0, "bad": "much"}[answer["content"]], True


class Shop:
    """Its tools differ by row, and it runs their calls itself."""

    tools = [{"type": "function", "function": {"name": "buy", "description": "Buy.", "parameters": {}}}]

    def reset(self, **row):
        self.sold = []

    def step(self, answer):
        calls = answer.get("tool_calls", [])
        self.sold += [call["function"]["name"] for call in calls]
        done = not calls
        return [{"role": "tool", "name": "buy", "content": "sold"}] if calls else None, float(done), done


FACTORIES = {"counter": Counter, "guess": Guess}


def right(completions, environments, **columns):
    return [float(len(one)) for one in completions]


def last(completions, **columns):
    return [float(one[-1]["content"] == "7") for one in completions]
'''


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def file(tmp_path) -> Path:
    (tmp_path / "own.py").write_text(CODE)
    return tmp_path / "own.py"


def test_a_tool_answers_and_only_sampled_tokens_are_trained(tokenizer, file):
    options = RolloutOptions((f"{file}:last",), tools=(f"{file}:add",), max_new_tokens=300)
    first = call("add", '{"a": 3, "b": 4}')
    rows = [{"prompt": "3 + 4?"}, {"prompt": "2 + 2?"}]
    (episode, other), complete, made = play(tokenizer, options, rows, [[first, "7<|im_end|>"], ["4<|im_end|>"]])
    result = (
        "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n"
    )
    assert parts(tokenizer, episode) == [(first, False), (result, True), ("7<|im_end|>", False)]
    assert parts(tokenizer, other) == [("4<|im_end|>", False)]
    # The second turn continues exactly these tokens; an episode that is over is not asked again.
    assert complete.asked[1][0] == [[*episode.prompt.tokens, *episode.tokens[: -len("7") - 1]]]
    assert complete.asked[1][1:] == [[0], [len(episode.tokens) - 2]]
    assert made.rewards.tolist() == [1, 0] and made.completions[0].finished
    assert made.completions[0].sampled_mask == [not seen for seen in episode.observed]
    assert episode.log_probs == [0.0 if seen else -0.5 for seen in episode.observed]
    assert '"name": "add"' in tokenizer.decode(episode.prompt.tokens)
    assert [message["role"] for message in episode.messages] == ["assistant", "tool", "assistant"]
    of_step = means(made)
    assert of_step["completions/mean_length"] == (len(first) - 9 + 2 + 2) / 2  # <|im_end|> is one token
    assert (of_step["tools/call_frequency"], of_step["tools/failure_frequency"]) == (0.5, 0)
    assert (of_step["episodes/turns"], of_step["episodes/failed_ratio"]) == (1.5, 0)


def test_a_conversation_with_calls_is_trained_as_its_episode(tokenizer, file):
    """Each answer of the training data comes after the tokens after which it is sampled."""
    options = RolloutOptions((f"{file}:last",), tools=(f"{file}:add",), max_new_tokens=300)
    script = [[call("add", '{"a": 3, "b": 4}'), "7<|im_end|>"]]
    (episode,), _, _ = play(tokenizer, options, [{"prompt": "3 + 4?"}], script)
    prompt, template = episode.prompt, ChatTemplate(tokenizer)
    (encoded,) = Encoder(tokenizer)([template.render([*prompt.messages, *episode.messages], list(prompt.tools))])
    tokens = [*prompt.tokens, *episode.tokens]
    assert encoded.tokens[: len(tokens)].tolist() == tokens
    trained = [False] * len(prompt.tokens) + [not seen for seen in episode.observed]
    assert (encoded.loss_weights[: len(tokens)] > 0).tolist() == trained


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (call("divide", "{}"), "{'error': 'Tool divide not found.'}"),
        (call("add", '{"a": 1}'), "missing 1 required positional argument: 'b'"),
        (call("add", '{"a": 1, "b": 2, "c": 3}'), "unexpected keyword argument 'c'"),
        (call("add", '{"a": 1, "b": "x"}'), "unsupported operand type"),
        (call("add", "[1, 2]"), "arguments must be an object"),
        (call("slow", '{"seconds": 20}'), "took more than 0.2 seconds"),
    ],
)
def test_a_call_that_fails_is_an_observation(tokenizer, file, wrong, error):
    options = RolloutOptions(
        (f"{file}:last",), tools=(f"{file}:add", f"{file}:slow"), max_new_tokens=500, call_seconds=0.2
    )
    (episode,), _, made = play(tokenizer, options, [{"prompt": "?"}], [[wrong, "7<|im_end|>"]])
    assert error in parts(tokenizer, episode)[1][0]
    assert means(made)["tools/failure_frequency"] == 1 and made.rewards.tolist() == [1]


def test_arguments_may_have_any_name(tokenizer, file):
    options = RolloutOptions((f"{file}:last",), tools=(f"{file}:evaluate",), max_new_tokens=300)
    script = [[call("evaluate", '{"function": "f"}'), "7<|im_end|>"]]
    (episode,), _, _ = play(tokenizer, options, [{"prompt": "?"}], script)
    assert "the value of f" in parts(tokenizer, episode)[1][0] and episode.failed_calls == 0


@pytest.mark.parametrize(
    "wrong", ["{add}", "[" * 3000, '{"name": "add", "arguments": ' + '{"a": ' * 3000], ids=["no JSON", "lists", "deep"]
)
def test_a_malformed_call_is_text(tokenizer, file, wrong):
    options = RolloutOptions((f"{file}:last",), tools=(f"{file}:add",), max_new_tokens=30_000)
    text = f"<tool_call>\n{wrong}\n</tool_call>"
    (episode,), _, _ = play(tokenizer, options, [{"prompt": "?"}], [[f"{text}<|im_end|>"]])
    assert episode.messages == [{"role": "assistant", "content": text}]


def test_limits_on_tokens_and_turns_end_an_episode(tokenizer, file):
    """As in TRL: a result that does not fit is dropped, and the episode stays finished; a cut turn is not finished."""
    again = call("add", '{"a": 1, "b": 1}')
    length = len(tokenizer(again)["input_ids"])
    options = dict(rewards=(f"{file}:last",), tools=(f"{file}:add",))
    for most, texts, finished in ((length + 20, 1, True), (length - 5, 1, False), (length * 2 + 50, 3, False)):
        (episode,), _, _ = play(
            tokenizer, RolloutOptions(**options, max_new_tokens=most), [{"prompt": "?"}], [[again] * 9]
        )
        assert (len(parts(tokenizer, episode)), episode.finished) == (texts, finished)
        assert len(episode.tokens) <= most
    (episode,), complete, _ = play(
        tokenizer, RolloutOptions(**options, max_new_tokens=900, max_turns=2), [{"prompt": "?"}], [[again] * 9]
    )
    assert len(complete.asked) == 2 and episode.finished and episode.calls == 1


def test_an_environment_of_trl_s_shape(tokenizer, file):
    options = RolloutOptions((f"{file}:right", f"{file}:Counter"), environment=f"{file}:Counter", max_new_tokens=400)
    rows = [{"prompt": "Count.", "start": 1}, {"prompt": [{"role": "user", "content": "Count."}], "start": 5}]
    rows.append({"prompt": "Count.", "start": -1})
    script = [[call("increase", '{"by": 2}'), "3<|im_end|>"], ["5<|im_end|>"], []]
    episodes, _, made = play(tokenizer, options, rows, script)
    assert "Count. It is 1.<|im_end|>" in tokenizer.decode(episodes[0].prompt.tokens)
    assert episodes[1].prompt.given == [{"role": "user", "content": "Count. It is 5."}]
    assert made.each["Counter"][:2].tolist() == [3, 5] and made.each["right"][:2].tolist() == [3, 1]
    # A reset that fails costs its episode: no reward, and no token is trained.
    assert episodes[2].failed and np.isnan(made.rewards[2]) and made.completions[2].tokens == []
    assert made.counts["failed"].tolist() == [0, 0, 1]


def test_an_environment_that_breaks_a_rule_costs_its_episode(tokenizer, file, caplog):
    """The prompt of the data stays: all processes have it, and it fits into a row."""
    options = RolloutOptions((f"{file}:Clerk",), environment=f"{file}:Clerk", max_new_tokens=60)
    row = {"prompt": "Rate.", "function": "f", "kind": "k"}
    rows = [row | {"text": text} for text in ("!", "!", "!" * 300)]
    script = [["good<|im_end|>"], ["bad<|im_end|>"], []]
    episodes, _, made = play(tokenizer, options, rows, script, seq_len=200)
    assert made.rewards.tolist() == pytest.approx([1, np.nan, np.nan], nan_ok=True)
    assert [episode.failed for episode in episodes] == [False, True, True]
    assert "step returns the reward 'much', which is not a number" in caplog.text
    assert "after reset the prompt has" in caplog.text
    assert max(len(prompt.tokens) for prompt in made.prompts) <= 200 - 60


def test_a_game_of_several_turns_that_fails_costs_its_episode(tokenizer, file, caplog):
    options = RolloutOptions(
        (f"{file}:Guess",), environment=f"{file}:Guess", max_new_tokens=400, call_seconds=0.3, max_turns=3
    )
    rows = [{"prompt": "Guess.", "secret": secret} for secret in (5, 5, 99, 5)]
    script = [["3<|im_end|>", "5<|im_end|>"], ["no number<|im_end|>"], ["95<|im_end|>"], ["1<|im_end|>"] * 3]
    episodes, _, made = play(tokenizer, options, rows, script)
    assert made.each["Guess"].tolist() == pytest.approx([0.9, np.nan, np.nan, -0.3], nan_ok=True)
    assert [episode.failed for episode in episodes] == [False, True, True, False]
    assert not any(made.completions[1].sampled_mask) and len(made.completions[1].tokens) == 10
    observed = "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert parts(tokenizer, episodes[0])[1] == (observed, True)
    assert "ValueError: invalid literal" in caplog.text and "took more than 0.3 seconds" in caplog.text


def test_an_environment_runs_the_calls_of_its_own_tools(tokenizer, file):
    options = RolloutOptions((f"{file}:Shop",), environment=f"{file}:Shop", max_new_tokens=400)
    (episode,), _, made = play(tokenizer, options, [{"prompt": "Buy."}], [[call("buy", "{}"), "done<|im_end|>"]])
    assert episode.environment.sold == ["buy"] and made.rewards.tolist() == [1]
    assert '"name": "buy"' in tokenizer.decode(episode.prompt.tokens)
    assert "<tool_response>\nsold\n</tool_response>" in parts(tokenizer, episode)[1][0]


def test_a_row_selects_its_environment(tokenizer, file):
    options = RolloutOptions((f"{file}:right",), environment=f"{file}:FACTORIES", max_new_tokens=400)
    rows = [{"environment": "counter", "start": 2}, {"environment": "guess", "secret": 4, "prompt": "Guess."}]
    episodes, _, made = play(tokenizer, options, rows, [["hm<|im_end|>"], ["4<|im_end|>"]])
    assert "increase" in tokenizer.decode(episodes[0].prompt.tokens)
    assert "increase" not in tokenizer.decode(episodes[1].prompt.tokens)
    assert made.rewards.tolist() == [1 + 2, 1 + 1]
    with pytest.raises(UserError, match="column 'environment' is 'chess', which rollout.environment does not have"):
        play(tokenizer, options, [{"environment": "chess", "prompt": "?"}], [[]])


def test_asynchronous_tools_run_side_by_side(tokenizer, file):
    options = RolloutOptions((f"{file}:last",), tools=(f"{file}:slow",), max_new_tokens=400)
    wait = [call("slow", '{"seconds": 0.3}'), "7<|im_end|>"]
    begun = time.monotonic()
    _, _, made = play(tokenizer, options, [{"prompt": "?"}] * 8, [wait] * 8)
    assert time.monotonic() - begun < 2 and made.rewards.tolist() == [1] * 8


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ({"tools": "f"}, "def f(a): return a\n", "f cannot be described to the model"),
        ({"tools": "nobody"}, "", "has no function nobody"),
        ({"environment": "E"}, "class E: pass\n", "has no method reset"),
        (
            {"environment": "e"},
            "class E: pass\nE.__module__ = 'verifiers.v1.env'\ne = E()\n",
            "E is not a verifiers.Environment; environments of verifiers 0.4 .* are not supported",
        ),
        ({"environment": "E"}, "class E:\n    def reset(self, **row): pass\n", "neither get_reward"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path, options, code, message):
    file = tmp_path / "own.py"
    file.write_text(code + "def r(**columns): return []\n")
    named = {name: f"{file}:{member}" for name, member in options.items()}
    rewards = (named.get("environment", f"{file}:r"),)
    if "tools" in named:
        named["tools"] = (named["tools"],)
    with pytest.raises(UserError, match=message):
        load_functions(Config(rollout=RolloutOptions(rewards, **named)))


def test_a_template_that_cannot_write_calls_is_refused(file, tmp_path):
    plain = byte_tokenizer(tmp_path / "plain")
    options = RolloutOptions((f"{file}:last",), tools=(f"{file}:add",))
    with pytest.raises(UserError, match="the chat template writes no tool calls"):
        play(plain, options, [{"prompt": "?"}], [[]])


def test_functions_are_tried_before_the_first_step(tokenizer, file):
    options = RolloutOptions((f"{file}:right",), environment=f"{file}:Counter")
    functions = load_functions(Config(rollout=options))
    prompt = Prompt("Count.", [1], {"start": 1})
    try_functions(Config(rollout=options), functions, prompt, tokenizer)
    clerk = RolloutOptions((f"{file}:Clerk",), environment=f"{file}:Clerk")
    row = {"function": "f", "kind": "k", "text": "!"}
    try_functions(Config(rollout=clerk), load_functions(Config(rollout=clerk)), prompt._replace(sample=row), tokenizer)
    with pytest.raises(UserError, match="Counter.reset fails: ValueError: no start below 0"):
        try_functions(Config(rollout=options), functions, prompt._replace(sample={"start": -1}), tokenizer)
