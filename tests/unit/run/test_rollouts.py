"""Rows of completions: which tokens are trained, and the order of the rows."""

import contextlib
import statistics
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack
from functools import partial
from threading import Event
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from completion_server import CompletionServer
from tiny import spec

from jaxtune.config.schema import Config, DataOptions, LogOptions, RolloutOptions, TrainOptions
from jaxtune.data import abstract_batch
from jaxtune.data.formats.prompts import Prompt
from jaxtune.data.rows.prompt_feed import PromptBatch
from jaxtune.errors import UserError
from jaxtune.inference.generation import Completion
from jaxtune.models.options import AttentionOptions
from jaxtune.objectives.grpo import grpo
from jaxtune.objectives.options import DistillOptions, GrpoOptions
from jaxtune.parallel.layout import P, by_token
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.rollout import completers, rollouts, sent_weights
from jaxtune.rollout.ahead import RolloutsAhead
from jaxtune.rollout.groups import Rollout, concatenate, replace_alike, spread, teaches
from jaxtune.rollout.own_answers import Distillation, make_distillation_step
from jaxtune.weights.base import Base
from jaxtune.weights.model import declare_model

PROMPTS = [[11, 12, 13], [21], [31, 32], [41, 42, 43, 44]]
FOUND = [Completion([1, 2], True), Completion([3, 4, 5], True), Completion([6], False), Completion([7, 8, 9], True)]


def batch(
    grpo_options: GrpoOptions,
    correction: Any = None,
    attention: AttentionOptions = AttentionOptions(),
    completions: Sequence[Completion] = FOUND,
) -> dict[str, np.ndarray]:
    """Return the columns of the rows of a step, two micro-batches of two rows."""
    mesh = make_mesh(MeshOptions(), jax.devices()[:1])
    options = RolloutOptions(("r.py:r",), max_new_tokens=4, correction=correction)
    objective = grpo(grpo_options, options)
    like = abstract_batch((2, 2, 8), jax.NamedSharding(mesh, P(None, *by_token())), objective.columns)
    prompts = [Prompt("", tokens, {}) for tokens in PROMPTS]
    found = [one._replace(log_probs=[-float(token) for token in one.tokens]) for one in completions]
    made = Rollout(prompts, found, [""] * 4, {}, np.zeros(4))
    config = Config(data=DataOptions(seq_len=8), rollout=options, grpo=grpo_options, attention=attention)
    program = SimpleNamespace(objective=objective, batch=like)
    columns = rollouts._batch(config, program, made, np.array([0.5, -0.5, 2.0, -2.0]))  # pyright: ignore
    assert {name: (x.shape, x.dtype) for name, x in columns.items()} == {
        name: (x.shape, x.dtype) for name, x in like.items() if name != "old_log_prob"
    }
    return {name: np.asarray(x).reshape(4, -1) for name, x in columns.items()}


def documents(rows: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Return the columns of each document, by its prompt's first token, the order of PROMPTS."""
    ids = rows["segment_ids"]
    places = [(row, ids[row] == segment) for row in range(len(ids)) for segment in range(1, ids[row].max() + 1)]
    found = [{name: x[row][there] for name, x in rows.items() if x[row].shape == there.shape} for row, there in places]
    return sorted(found, key=lambda columns: columns["tokens"][0])


def test_completions_are_packed_and_their_tokens_alone_are_targets():
    rows = batch(GrpoOptions(iterations=2))
    assert (rows["segment_ids"].max(1) > 0).tolist() == [True, True, True, False], "19 tokens, rows of 8"
    found = documents(rows)
    for columns, prompt, completion in zip(found, PROMPTS, FOUND, strict=True):
        trained = columns["loss_weight"] > 0
        assert columns["targets"][trained].tolist() == completion.tokens
        assert np.flatnonzero(trained)[0] == len(prompt) - 1, "the prompt's last token predicts the first"
        assert columns["tokens"].tolist() == [*prompt, *completion.tokens]
        assert columns["positions"].tolist() == list(range(len(prompt) + len(completion.tokens)))
    assert [columns["advantage"][0] for columns in found] == [0.5, -0.5, 2.0, -2.0]


def test_a_kernel_with_a_bound_on_documents_gets_one_in_each_row():
    rows = batch(GrpoOptions(iterations=2), attention=AttentionOptions("fa3"))
    assert rows["segment_ids"].max(1).tolist() == [1, 1, 1, 1]


def test_the_log_probability_of_a_token_is_where_it_is_predicted():
    rows = batch(GrpoOptions(), "token_truncate")
    trained = rows["loss_weight"] > 0
    np.testing.assert_array_equal(rows["sampled_log_prob"], np.where(trained, -rows["targets"], 0))


def test_completions_that_did_not_end_may_teach_nothing():
    found = documents(batch(GrpoOptions(mask_truncated=True)))
    assert [columns["loss_weight"].sum() > 0 for columns in found] == [True, True, False, True]


def test_only_the_most_uncertain_of_the_trained_tokens_keep_their_advantage():
    """Observed tokens, completions that are not trained, and prompts do not count."""
    entropies = [[2.0, 1.0], [0.5, 0.3], [9.0], [3.0, 0.1, 1.5]]
    observed = [(), (False, True, False), (), ()]
    found = [one._replace(entropies=x, observed=o) for one, x, o in zip(FOUND, entropies, observed)]
    rows = documents(batch(GrpoOptions(mask_truncated=True, entropy_share=0.5), completions=found))
    kept = [columns["targets"][columns["advantage"] != 0].tolist() for columns in rows]
    assert kept == [[1, 2], [], [], [7, 9]], "2.0, 1.0, 0.5, 0.3, 3.0, 0.1 and 1.5 have the median 1.0"
    assert [columns["loss_weight"].sum() for columns in rows] == [2, 2, 0, 3], "the mean is over all trained tokens"


def rewarded(number: int, reward: float) -> Rollout:
    """Return a group of two completions of a prompt with this number; its rewards differ by `reward`."""
    prompts = [Prompt(str(number), [number], {})] * 2
    return Rollout(prompts, FOUND[:2], ["a", "b"], {"r": np.array([0.0, reward])}, np.array([0.0, reward]))


def test_prompts_that_teach_nothing_are_replaced_by_spare_ones():
    """As many as are needed, in their order, until all differ or there are no more."""
    asked, calls = PromptBatch([Prompt("", [0], {})] * 3, 100, [Prompt("", [n], {}) for n in range(4)]), []
    rewards = {0: 0.0, 1: 1.0, 2: 0.0, 3: 1.0}

    def make_groups(first: int, prompts: Sequence[Prompt]) -> list[Rollout]:
        calls.append((first, [prompt.tokens[0] for prompt in prompts]))
        return [rewarded(prompt.tokens[0], rewards[prompt.tokens[0]]) for prompt in prompts]

    useful = partial(teaches, "group")
    groups = [rewarded(10, 0.0), rewarded(11, 1.0), rewarded(12, np.nan)]
    found = concatenate(replace_alike(groups, asked, make_groups, useful))
    assert calls == [(106, [0, 1]), (110, [2]), (112, [3])]
    assert [prompt.tokens[0] for prompt in found.prompts] == [1, 1, 11, 11, 3, 3]
    assert found.rewards.tolist() == found.each["r"].tolist() == [0, 1] * 3
    assert replace_alike(groups, asked._replace(spare=[]), make_groups, useful) == groups and len(calls) == 3


def test_a_group_whose_known_rewards_are_equal_counts_as_one_without_spread():
    """As TRL's frac_reward_zero_std: a group with fewer than two rewards has no standard deviation, not one of 0."""
    found = spread(np.array([1, 1, 0, 1, np.nan, np.nan, 2, np.nan]), 2)
    assert found == {"reward_std": pytest.approx(np.std([1, 1, 0, 1, 2], ddof=1)), "frac_reward_zero_std": 0.25}


def test_functions_that_are_scaled_apart_teach_even_if_their_sums_are_equal():
    each = {"r": np.array([0.0, 1.0]), "s": np.array([1.0, 0.0])}
    group = rewarded(0, 0.0)._replace(each=each, rewards=np.ones(2))
    assert teaches("gdpo", group) and not teaches("group", group)


def test_steps_without_any_reward_end_the_run(tmp_path, monkeypatch):
    """A step with a reward in between resets the count."""
    monkeypatch.setattr(rollouts, "_batch", lambda *_: {})
    config = Config(
        rollout=RolloutOptions(("r.py:r",), group_size=2),
        train=TrainOptions(max_bad_steps=2),
        log=LogOptions(jsonl=False),
    )
    rewards = iter([np.nan, 1.0, np.nan, np.nan])

    def make(weights, prompts, numbers):
        return Rollout(prompts, FOUND[:2], [""] * 2, {}, np.full(2, next(rewards)))

    program = SimpleNamespace(model=SimpleNamespace(graph=None, linears=None))
    sampled = rollouts.Rollouts(lambda trained, frozen: trained, make)
    step = rollouts.make_rollout_step(config, program, sampled, lambda state, *_: (state, {}), tmp_path, ExitStack())  # pyright: ignore
    state, batch = SimpleNamespace(trained={}), PromptBatch([Prompt("", [1], {})], 0)
    for _ in range(3):
        step(state, {}, batch, 0.0)
    with pytest.raises(UserError, match="None for every completion of 2 steps in a row .train.max_bad_steps., so"):
        step(state, {}, batch, 0.0)


def test_later_steps_are_made_while_the_devices_train():
    """A step gets its completions before the next step's are made; these are sampled from the weights that it had."""
    calls, may_go_on = [], {0: Event(), 1: Event(), 2: Event(), 3: Event()}
    may_go_on[0].set()

    def make(weights, asked):
        may_go_on[asked.first].wait(timeout=60)
        calls.append((asked.first, weights))
        return [rewarded(asked.first, 1.0)]

    steps, prepared, ahead = [PromptBatch([], number) for number in range(4)], [], RolloutsAhead(make)
    for number, step in enumerate(steps):
        prepare = lambda number=number: prepared.append(number) or number  # noqa: E731
        (group,), waited = ahead.get(prepare, step._replace(later=steps[number + 1 : number + 2]))
        assert group.prompts[0].given == str(number) and len(calls) == number + 1 and waited >= 0
        may_go_on[min(number + 1, 3)].set()
    assert calls == [(0, 0), (1, 0), (2, 1), (3, 2)]
    assert prepared == [0, 1, 2], "the last step asks for nothing"


def test_a_server_completes_for_the_next_step_while_this_one_is_updated(monkeypatch, tmp_path, one_device):
    """The two wait for each other: if one began only when the other has ended, neither would continue."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(completers, "stops_of", lambda *_: frozenset({3}))
    monkeypatch.setattr(sent_weights, "export_weights", lambda *_: None)
    monkeypatch.setattr(rollouts, "_batch", lambda *_: {})
    together, begun, count = threading.Barrier(2), [], 4

    def script(prompt: list[int], seed: int) -> list[int]:
        if prompt[0] not in begun:
            begun.append(prompt[0])
            if prompt[0]:  # the first step has nothing to train meanwhile
                together.wait(timeout=60)
        return [seed % 200, 3]

    def train_step(state: Any, *_: Any) -> Any:
        trained.append(len(trained))
        if len(trained) < count:  # no step comes after the last one
            together.wait(timeout=60)
        return state, {}

    with CompletionServer(script) as server, ExitStack() as at_end:
        options = {"server": server.url, "ahead": 1, "group_size": 2, "max_new_tokens": 4, "correction": "none"}
        config = Config(rollout=RolloutOptions(("r.py:r",), **options), log=LogOptions(jsonl=False))  # pyright: ignore
        model, trained = declare_model(Base(spec(1)), config, one_device), []
        source = completers.complete_by_server(config, model, None, tmp_path / "weights")

        def make(weights: Any, prompts: list[Prompt], numbers: Sequence[int]) -> Rollout:
            completions = source.complete(weights, [prompt.tokens for prompt in prompts], numbers)
            return rewarded(prompts[0].tokens[0], 1.0)._replace(completions=completions)

        program: Any = SimpleNamespace(model=SimpleNamespace(graph=None, linears=None))
        sampled = rollouts.Rollouts(source.prepare, make, source.close)
        step = rollouts.make_rollout_step(config, program, sampled, train_step, tmp_path, at_end)
        at_end.callback(source.close)
        asked = [PromptBatch([Prompt("", [number], {})], 2 * number) for number in range(count)]
        state: Any = SimpleNamespace(trained={})
        for number, prompts in enumerate(asked):
            step(state, {}, prompts._replace(later=asked[number + 1 : number + 2]), 0.0)
    assert begun == trained == list(range(count)) and not together.broken


def test_a_student_s_answers_on_a_server_need_no_log_probabilities(monkeypatch, tmp_path, one_device):
    """Distillation corrects nothing, and rollout.correction, which could switch them off, is only for rewards."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(completers, "stops_of", lambda *_: frozenset({3}))
    monkeypatch.setattr(sent_weights, "export_weights", lambda *_: None)
    with CompletionServer(lambda prompt, seed: [prompt[-1] + 1, 3]) as server:
        server.log_probs = None  # it returns none
        config = Config(rollout=RolloutOptions(server=server.url, max_new_tokens=4))
        model = declare_model(Base(spec(1)), config, one_device)
        source = completers.complete_by_server(config, model, None, tmp_path / "weights")
        assert source.complete(source.prepare({}, {}), [[10]], [0])[0].tokens == [11, 3]


def test_an_error_of_a_later_step_is_raised_in_it():
    def make(weights, asked):
        if asked.first:
            raise UserError("the server is gone")
        return [rewarded(0, 1.0)]

    first, second = PromptBatch([], 0, later=[PromptBatch([], 1)]), PromptBatch([], 1)
    ahead = RolloutsAhead(make)
    ahead.get(dict, first)
    with pytest.raises(UserError, match="the server is gone"):
        ahead.get(dict, second)


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_a_run_drops_later_rollouts_and_ends_their_thread(tmp_path, fails):
    """After an error, too. What is being made then gets an error, and what was asked for after it is not made."""
    begun, dropped, calls = Event(), Event(), []

    def make(weights, prompts, numbers):
        calls.append(prompts[0].given)
        if prompts[0].given != "0":
            begun.set()
            dropped.wait(timeout=60)
            raise CancelledError
        return rewarded(0, 1.0)

    def train_step(state, *_):
        if fails:
            raise UserError("the run ends")
        return state, {}

    program: Any = SimpleNamespace(model=SimpleNamespace(graph=None, linears=None))
    options = RolloutOptions(("r.py:r",), server="http://localhost:1", ahead=2, group_size=2, correction="none")
    config, at_end = Config(rollout=options, log=LogOptions(jsonl=False)), ExitStack()
    sampled = rollouts.Rollouts(lambda trained, frozen: None, make, dropped.set)
    threads = set(threading.enumerate())
    steps = [PromptBatch([Prompt(str(number), [number], {})], 2 * number) for number in range(3)]
    with pytest.raises(UserError, match="the run ends") if fails else contextlib.nullcontext(), at_end:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rollouts, "_batch", lambda *_: {})
            step = rollouts.make_rollout_step(config, program, sampled, train_step, tmp_path, at_end)
            at_end.callback(sampled.close)
            step(SimpleNamespace(trained={}), {}, steps[0]._replace(later=steps[1:]), 0.0)  # pyright: ignore
        begun.wait(timeout=60)
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert calls in (["0"], ["0", "1"])


def test_several_processes_do_not_sample_ahead(monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    config: Any = Config(rollout=RolloutOptions(("r.py:r",), server="http://localhost:1", ahead=1))
    nothing: Any = None
    with pytest.raises(UserError, match="rollout.ahead=1: not available in a run of several processes"):
        rollouts.make_rollout_step(config, nothing, nothing, nothing, tmp_path, ExitStack())


def test_a_share_of_steps_trains_on_the_student_s_own_answers(tmp_path):
    """As TRL's lambda for GKD. A repeated step draws the same; another seed draws others."""
    completer: Any = completers.Completer(lambda trained, frozen: None, lambda weights, prompts, numbers: FOUND[:1])

    def draw(seed: int) -> list[bool]:
        """Return whether each of 400 steps has the student's answers."""
        answered = []
        parts: Any = Distillation(None, completer, lambda *asked: answered.append(asked[-1] is not None))  # pyright: ignore
        options = {"distill": DistillOptions("teacher", 0.25), "train": TrainOptions(seed=seed)}
        config = Config(**options, log=LogOptions(jsonl=False))  # pyright: ignore
        step = make_distillation_step(config, parts, None, lambda state, *_: (state, {}), tmp_path)
        for first in range(400):
            state: Any = SimpleNamespace(trained={})
            _, metrics = step(state, {}, PromptBatch([Prompt("", [1], {})], first), 0.0)
            assert ("completions/mean_length" in metrics) == answered[-1]
        return answered

    drawn = draw(seed=0)
    assert drawn == draw(seed=0) != draw(seed=1)
    assert abs(np.mean(drawn) - 0.25) < 0.07


def test_an_evaluation_says_how_far_its_rewards_spread_over_prompts():
    """Over all batches; a prompt without a reward does not count. No step of training has its random numbers."""
    rewards, numbered = np.array([0.0, 1.0, np.nan, 0.5, 1.0]), []

    def make(weights, prompts, numbers):
        numbered.extend(numbers)
        values = rewards[[prompt.tokens[0] for prompt in prompts]]
        return Rollout(prompts, FOUND[: len(prompts)], [""] * len(prompts), {"r": values}, values)

    prompts, sampled = [Prompt("", [n], {}) for n in range(5)], rollouts.Rollouts(lambda trained, frozen: trained, make)
    found = rollouts.make_evaluate(Config(), sampled, prompts, at_once=2)({}, {}, {})
    known = rewards[~np.isnan(rewards)]
    assert found["eval_reward"] == known.mean()
    assert found["eval_reward_std"] == pytest.approx(statistics.stdev(known))
    assert found["eval_reward_stderr"] == pytest.approx(statistics.stdev(known) / 2)
    assert len(set(numbered)) == 5 and max(numbered) < 0
