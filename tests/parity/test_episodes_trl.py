"""Episodes with tools equal TRL's, of its GRPOTrainer: tokens, masks, messages, and calls that are parsed."""

import json
from types import SimpleNamespace

import pytest
from tiny import byte_tokenizer

from jaxtune.config.schema import ChatOptions, Config, DataOptions, Dataset, RolloutOptions
from jaxtune.data.chat.chat_template import ChatTemplate
from jaxtune.data.formats.prompts import Prompts
from jaxtune.hf.chat_templates import NAMED, find_template
from jaxtune.inference.generation import Completion
from jaxtune.rollout.episodes.answer_parser import AnswerParser
from jaxtune.rollout.episodes.episode_player import EpisodePlayer
from jaxtune.rollout.episodes.observations import Observations
from jaxtune.rollout.episodes.toolbox import load_functions

pytest.importorskip("torch", reason="the reference is TRL, which needs torch (Python 3.11 here)")
trl = pytest.importorskip("trl", reason="the reference is TRL, which needs torch (Python 3.11 here)")
utils = pytest.importorskip("trl.chat_template_utils")

TOOLS = '''
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first one.
        b: the second one.
    """
    return a + b


def lookup(name: str) -> str:
    """Look a name up.

    Args:
        name: the name.
    """
    return {"x": "7"}[name]


def zero(completions, **columns):
    return [0.0] * len(completions)
'''
JSON = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
    "</tool_call>"
)
TEXT = "<tool_call>\n<function=lookup>\n<parameter=name>\n75001\n</parameter>\n</function>\n</tool_call>"
KEYS = "<tool_call>lookup\n<arg_key>name</arg_key>\n<arg_value>x y</arg_value>\n</tool_call>"
THOUGHT = "</think>\n\n"  # these templates begin the thought themselves
ANSWERS = {
    "qwen3": ["It is 3.", JSON, f"I add.\n{JSON}", f"{JSON}\n{JSON}", "<tool_call>\n{add}\n</tool_call>"],
    "qwen3_2507": [JSON, "<think>\nhm\n</think>\n\nIt is 3.", f"<think>\nhm\n</think>\n\n{JSON}"],
    "qwen3_5": [f"hm\n{THOUGHT}{text}" for text in (XML, TEXT, f"I add.\n\n{XML}", f"{XML}\n{TEXT}", "It is 3.")],
    "nemotron_3_nano": [f"hm\n{THOUGHT}{text}" for text in (XML, "It is 3.")],
    "glm4_moe": [KEYS, "It is 3."],
    "lfm2_5": ["<|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|>", "It is 3."],
}
TRL_TEMPLATES = {"qwen3": "qwen3_chat_template"}


def tokenizer_of(folder, name: str):
    made = byte_tokenizer(folder / name, special=("<|endoftext|>", *NAMED[name]), eos=None)
    ends = {"glm4_moe": "<|user|>"}
    made.eos_token = ends.get(name, "<|im_end|>")
    made.chat_template = find_template(name, made.get_vocab())
    return made


def theirs(name: str, folder):
    """Return the tokenizer with TRL's response template of the published chat template."""
    made = tokenizer_of(folder, name)
    if name in TRL_TEMPLATES:
        made.chat_template = getattr(utils, TRL_TEMPLATES[name])
    return utils.add_response_schema(made)


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_parsed_alike(name, tmp_path):
    (tmp_path / "own.py").write_text(TOOLS)
    options = RolloutOptions(
        (f"{tmp_path}/own.py:zero",), tools=tuple(f"{tmp_path}/own.py:{f}" for f in ("add", "lookup"))
    )
    toolbox = load_functions(Config(rollout=options)).toolbox
    ours, other = tokenizer_of(tmp_path / "ours", name), theirs(name, tmp_path / "theirs")
    template, schemas = ChatTemplate(ours), toolbox.schemas({})
    parse = AnswerParser(ours, template, calls=True)
    prompt = template.prompt([{"role": "user", "content": "1 + 2?"}], schemas)
    for text in ANSWERS[name]:
        tokens = ours(text + ours.eos_token)["input_ids"]
        expected = utils.parse_response(other, tokens, prefix=prompt, tools=schemas)
        assert parse(tokens, True, prompt, schemas) == expected, text


@pytest.mark.parametrize("name", ["qwen3_2507", "qwen3_5_nothinking", "lfm2_5", "nemotron_3_nano"])
def test_results_of_tools_are_rendered_alike(name, tmp_path):
    tokenizer = tokenizer_of(tmp_path, name)
    trainer = object.__new__(trl.GRPOTrainer)
    trainer.__dict__.update(
        processing_class=tokenizer, _tokenizer=tokenizer, chat_template=None, _is_vlm=False, chat_template_kwargs={}
    )
    ours = Observations(tokenizer, ChatTemplate(tokenizer), frozenset({tokenizer.eos_token_id}))
    one = {"role": "tool", "name": "add", "content": "3 <|im_end|> 4"}
    for messages in ([one], [one, {"role": "tool", "name": "lookup", "content": "{'error': \"'y'\"}"}]):
        assert ours.tokens(messages, stopped=True) == trainer._get_tool_suffix_ids(messages)


@pytest.mark.parametrize(("most", "turns"), [(2000, None), (2000, 2), (270, None), (len(JSON) + 60, None)])
def test_a_loop_gives_the_same_episodes(tmp_path, most, turns):
    """With budgets that cut turns and results, errors of tools, and a limit on turns."""
    (tmp_path / "own.py").write_text(TOOLS)
    file = tmp_path / "own.py"
    tokenizer = utils.add_response_schema(theirs("qwen3_2507", tmp_path))
    wrong = JSON.replace("add", "lookup")
    script = [[JSON, "3"], ["3"], [JSON, JSON, JSON, "6"], [wrong, f"{JSON}\n{JSON}", "It is 3."], [JSON, "x" * 300]]
    options = RolloutOptions(
        (f"{file}:zero",), tools=(f"{file}:add", f"{file}:lookup"), max_new_tokens=most, max_turns=turns
    )
    config = Config(data=DataOptions(seq_len=9000), rollout=options)
    functions = load_functions(config)
    prompts = Prompts(tokenizer, ChatOptions(), row_tools=functions.row_tools)
    made = [prompts(Dataset(), {"prompt": [{"role": "user", "content": f"{i}?"}]}) for i in range(len(script))]
    of_prompt = {tuple(one.tokens): i for i, one in enumerate(made)}
    turn_of: dict[int, int] = {}

    def sample(ids, numbers=None):
        found = []
        for tokens in ids:
            number = next(i for one, i in of_prompt.items() if list(one) == list(tokens[: len(one)]))
            turn = turn_of[number] = turn_of.get(number, -1) + 1
            found.append(tokenizer(script[number][turn] + "<|im_end|>")["input_ids"][:most])
        return found

    def complete(weights, prompts, numbers, written=None):
        texts = [one[: most - there] for one, there in zip(sample(prompts), written)]
        return [Completion(one, one[-1] == tokenizer.eos_token_id) for one in texts]

    play = EpisodePlayer(config, tokenizer, frozenset({tokenizer.eos_token_id}), functions.toolbox, complete)
    episodes = play({}, made, range(len(made)))
    turn_of.clear()
    trainer = object.__new__(trl.GRPOTrainer)
    tools = {name: tool.function for name, tool in functions.toolbox.tools.items()}
    trainer.__dict__.update(
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        chat_template=None,
        _is_vlm=False,
        chat_template_kwargs={},
        max_tool_calling_iterations=10**9 if turns is None else turns - 1,
        max_completion_length=most,
        use_vllm=False,
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=10**9)),
        tools=list(tools.values()),
        environment_factories=None,
        _sync_tool_dicts=[tools] * len(script),
        _async_tool_dicts=[{}] * len(script),
        _generate_single_turn=lambda ids, *_, **__: (sample(ids), None),
    )
    ids = [list(one.tokens) for one in made]
    first = sample(ids)
    parsed = [[utils.parse_response(tokenizer, one, prefix=p, tools=trainer.tools)] for one, p in zip(first, ids)]
    given = [list(one.given) for one in made]
    mask, messages, tokens, _, calls, failures, _ = trainer._tool_call_loop(given, ids, first, parsed, None, None, {})
    assert [one.tokens for one in episodes] == tokens
    assert [[int(not seen) for seen in one.observed] for one in episodes] == mask
    assert [one.messages for one in episodes] == messages, json.dumps([one.messages for one in episodes])
    assert sum(one.calls for one in episodes) == calls
    assert sum(one.failed_calls for one in episodes) == failures
