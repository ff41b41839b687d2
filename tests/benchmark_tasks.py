"""Tasks for lm-evaluation-harness, one of each kind of request, with files of a few questions."""

import json
from functools import partial
from pathlib import Path

import pytest

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}, train: {data}}}, cache_dir: {cache}}}
test_split: test
fewshot_split: train
{rest}
"""
TASK_OPTIONS = {
    "tiny_choice": """
output_type: multiple_choice
description: "Answer.\n"
doc_to_text: "Q: {{question}}\nA:"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: " "
""",
    "tiny_text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "tiny_answer": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: ["\n"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
""",
}
QUESTIONS = [
    {
        "question": f"say{' it' * 9 * i}",
        "choices": ["red", "green and blue", "b"],
        "answer": i % 3,
        "text": "red " * 20 * i,
    }
    for i in range(4)
]


def write_tasks(folder: Path, **texts: str) -> Path:
    """Write a YAML file for each task to `folder` and return it; `texts` adds tasks by name."""
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, rest in (TASK_OPTIONS | texts).items():
        text = TASK.format(name=name, data=data, cache=folder / "cache", rest=rest)
        (folder / f"{name}.yaml").write_text(text)
    return folder


def hide_harness_tasks(patch: pytest.MonkeyPatch) -> None:
    """Let commands know only the tasks of --include_path: the harness's own are thousands of files and take seconds."""
    from jaxtune.evaluation import lm_evaluation_harness as harness

    patch.setattr(harness, "_Tasks", partial(harness._Tasks, include_defaults=False))
