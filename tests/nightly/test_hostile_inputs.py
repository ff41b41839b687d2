"""Hostile files and answers are used, or refused by one message, in bounded time and memory; their code never runs.

Inputs are mutations of real files. CAMPAIGN_SEED, a number, draws others; CAMPAIGN_INPUTS sets the number of each kind.
"""

import json
import os
import struct
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import yaml
from completion_server import CompletionServer
from faults.test_hostile_weights import FILES, SHAPES, write_index
from faults.test_hostile_weights import read as read_weights
from hostile import CANARY, CODE, Outcomes, damaged_bytes, encode_text, json_files, mutated_values
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from published_configs import FORMS
from safetensors.numpy import save
from tiny import byte_tokenizer
from unit.commands.test_report import run as run_folder

from jaxtune import hf, report
from jaxtune.config import read_recipe
from jaxtune.config.schema import Config, Dataset, ModelOptions
from jaxtune.data.cache.documents import tokenize
from jaxtune.data.chat import sandbox
from jaxtune.errors import UserError
from jaxtune.models.families import read_spec
from jaxtune.models.parameters import declare
from jaxtune.rollout.completion_server import complete
from jaxtune.rollout.server_pool import ServerPool
from jaxtune.weights.architecture import spec_of

COVERS = (
    "jaxtune/config",
    "jaxtune/data",
    "jaxtune/hf",
    "jaxtune/json_file.py",
    "jaxtune/models/families",
    "jaxtune/monitor",
    "jaxtune/report.py",
    "jaxtune/rollout/completion_server.py",
    "jaxtune/rollout/server_request.py",
    "jaxtune/rollout/server_pool.py",
    "jaxtune/host/run_folder.py",
    "tests/hostile.py",
)

SEED = int(os.environ.get("CAMPAIGN_SEED", "0"))
INPUTS = int(os.environ.get("CAMPAIGN_INPUTS", "250"))
FOREIGN = Path(__file__).parents[1] / "golden" / "foreign"
TEMPLATES = Path(hf.__file__).with_name("templates")


def campaign(test):
    """Draw INPUTS inputs from SEED; hypothesis shows the smallest one that fails, and how to repeat it."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    phases = [Phase.generate, Phase.shrink]
    options = dict(max_examples=INPUTS, deadline=None, print_blob=True, database=None)
    return seed(SEED)(settings(suppress_health_check=checks, phases=phases, **options)(test))


@pytest.fixture(scope="module", autouse=True)
def no_code_has_run():
    yield
    assert not CANARY.exists()


@pytest.fixture
def outcomes(request, capsys):
    found = Outcomes(request.node.name)
    yield found
    with capsys.disabled():
        print(f"\nseed {SEED}: {found}")
    assert found.counts["refused"] > INPUTS / 20, "no mutation of that kind does harm: it does not reach the reader"


@campaign
@given(data=st.data())
def test_config_json(outcomes, tmp_path, data):
    kind = data.draw(st.sampled_from(sorted(FORMS)))
    (tmp_path / "config.json").write_bytes(data.draw(json_files(FORMS[kind] | {"model_type": kind})))
    config = Config(model=ModelOptions(path=str(tmp_path)))
    described = lambda: hf.read_described_config(config.model)  # noqa: E731
    outcomes.read(lambda: declare(spec_of(described(), hf.read_config(tmp_path), config)))


OTHER_TYPES = (True, "text", [1], {"a": 1})


@pytest.mark.parametrize("kind", FORMS)
def test_a_value_of_another_type_is_never_taken_for_a_number_or_a_text(kind):
    """It is refused, or the model is the same as without the value or with the good value (nobody reads it)."""
    good = FORMS[kind] | {"model_type": kind}
    spec, refused = read_spec(good), 0
    for (*path, key), holder in _entries(good):
        without = _changed(good, path, {name: value for name, value in holder.items() if name != key})
        for other in OTHER_TYPES:
            if isinstance(other, type(holder[key])):
                continue
            try:
                found = read_spec(_changed(good, path, holder | {key: other}))
            except UserError:
                refused += 1
                continue
            assert found == spec or found == _spec_or_none(without), (path, key, other)
    assert refused > 25


def _entries(form, path=()):
    for key, value in form.items():
        yield (*path, key), form
        if isinstance(value, dict):
            yield from _entries(value, (*path, key))


def _changed(form, path, holder):
    if not path:
        return holder
    first, *rest = path
    return form | {first: _changed(form[first], rest, holder)}


def _spec_or_none(form):
    try:
        return read_spec(form)
    except UserError:
        return None


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Write the files of a byte tokenizer, and of one in SentencePiece's form."""
    folder = tmp_path_factory.mktemp("bytes")
    byte_tokenizer(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@campaign
@given(data=st.data())
def test_tokenizer(outcomes, tmp_path, tokenizers, data):
    for name, content in tokenizers.items():
        (tmp_path / name).write_bytes(content)
    name = data.draw(st.sampled_from(sorted(name for name in tokenizers if name.endswith(".json"))))
    (tmp_path / name).write_bytes(data.draw(json_files(json.loads(tokenizers[name]))))
    (tmp_path / "text.jsonl").write_text('{"text": "A text."}\n{"text": "Another one <|im_end|>."}\n')

    def read():
        tokenizer = hf.load_tokenizer(tmp_path)
        documents = tokenize((Dataset(path=str(tmp_path / "text.jsonl")),), tokenizer, tmp_path / "cache")
        assert len(documents) == 2

    outcomes.read(read)


@pytest.fixture
def weights(tmp_path):
    write_index(tmp_path, FILES)
    for name, shape in SHAPES.items():
        (tmp_path / FILES[name]).write_bytes(save({name: np.ones(shape, np.float32)}))
    return tmp_path


@campaign
@given(data=st.data())
def test_safetensors_header(outcomes, weights, data):
    file = weights / FILES["a"]
    good = save({"a": np.ones(SHAPES["a"], np.float32)})
    end = 8 + struct.unpack("<Q", good[:8])[0]
    header = data.draw(json_files(json.loads(good[8:end])))
    size = data.draw(st.just(len(header)) | st.sampled_from([0, 2**31, 2**63, 2**64 - 1]) | st.integers(0, 200))
    file.write_bytes(struct.pack("<Q", size) + header + good[end:])
    message = outcomes.read(lambda: _whole(weights))
    assert message is None or str(weights) in message


@campaign
@given(data=st.data())
def test_index(outcomes, weights, data):
    good = {"metadata": {"total_size": 100}, "weight_map": FILES}
    (weights / "model.safetensors.index.json").write_bytes(data.draw(json_files(good)))
    message = outcomes.read(lambda: _whole(weights))
    assert message is None or str(weights) in message


def _whole(folder: Path) -> None:
    """Read the weights and check their shapes."""
    assert {name: array.shape for name, array in read_weights(folder).items()} == SHAPES


@campaign
@given(data=st.data())
def test_yaml(outcomes, tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    file = data.draw(st.sampled_from(sorted(FOREIGN.glob("*.yaml"))))
    good = file.read_text()
    bad = data.draw(
        st.one_of(
            mutated_values(yaml.safe_load(good)).map(_yaml), damaged_bytes(good.encode()), _lines(good.splitlines())
        )
    )
    Path("my.yaml").write_bytes(bad)
    outcomes.read(lambda: read_recipe("my.yaml").resolve(()))


def _yaml(value) -> bytes:
    return encode_text(yaml.safe_dump(value, allow_unicode=True))


BOMBS = [
    "a: &a [x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a]\nc: &c [*b, *b, *b, *b, *b]\nd: [*c, *c, *c, *c]",
    "a: &a [*a]",
    "<<: {model: 1}",
    "? [a, b]\n: 1",
    "yes: no",
    "~: 1",
    "%TAG ! tag:yaml.org,2002:python/",
    "2001-01-01: 0o17",
]


def _lines(good: list[str]) -> st.SearchStrategy[bytes]:
    """Draw lines in another order, some hostile, doubled or left out."""
    line = st.sampled_from([*good, *BOMBS, *(f"model: {code}" for code in CODE)])
    return st.lists(line, min_size=1, max_size=30).map(lambda lines: "\n".join(lines).encode())


HOSTILE_EXPRESSIONS = [
    *(
        "{{ 'x'.ljust(10**10) }}",
        "{{ '%3000000000d' % 1 }}",
        "{{ 9**9**9 }}",
        "{{ (10**8) * 'x' }}",
        "{{ [0] * 10**9 }}",
    ),
    *(
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages.x.y }}",
    ),
    *(
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ ''.format }}",
    ),
    *(
        "{{ '{0.__class__}'.format('') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{{ self }}",
    ),
    *(
        "{{ range(10**6) | join('x' * 10**4) }}",
        "{% if %}",
        "{{",
        "{% endfor %}",
        "{{ raise_exception('no') }}",
        "\ufdd0",
    ),
    *("{{ ('x' * 10**7) | list | sort | join | upper }}", "{{ strftime_now('%9999999Y') }}", "{% generation %}", *CODE),
]


@campaign
@given(data=st.data())
def test_chat_template(outcomes, monkeypatch, data):
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.5)
    good = data.draw(st.sampled_from(sorted(TEMPLATES.glob("*.jinja")))).read_text()
    tags = [place for place in range(len(good) + 1) if good[place : place + 1] in ("", "{", "}", "|", "[", ".")]
    bad = good
    for _ in range(data.draw(st.integers(1, 3))):
        first, last = sorted(data.draw(st.tuples(*[st.sampled_from(tags)] * 2)))
        last = data.draw(st.sampled_from([first, first, last]))
        bad = bad[:first] + data.draw(st.sampled_from(["", *HOSTILE_EXPRESSIONS])) + bad[last:]
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": data.draw(st.text(max_size=4))}]
    outcomes.read(lambda: sandbox.Template(bad).render(messages=data.draw(st.just(chat) | mutated_values(chat))))


class _Answers(CompletionServer):
    """A server that answers each request with the same bytes."""

    body = b""

    def answer(self, path, body, authorization):
        return 200, self.body


@pytest.fixture(scope="module")
def server():
    with _Answers(lambda prompt, seed: []) as server:
        yield server


@campaign
@given(data=st.data())
def test_answers_of_a_server(outcomes, server, monkeypatch, data):
    monkeypatch.setenv("no_proxy", "*")
    choice = {"index": 0, "text": "a", "finish_reason": "stop", "token_ids": [5, 6, 2]}
    server.body = data.draw(json_files({"object": "text_completion", "choices": [choice], "usage": {"n": 3}}))
    asked = dict(max_tokens=3, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, stop={2})

    def read():
        limits = dict(vocabulary=10, seed=0, timeout=5.0, wait=lambda seconds: None)
        (found,) = complete(ServerPool([server.url]), "base", [[1]], [0], **asked, **limits)
        assert len(found.tokens) <= 3 and all(type(t) is int and 0 <= t < 10 for t in found.tokens)

    outcomes.read(read)


CHATS = [
    {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "red"}], "n": n}
    for n in range(4)
]


@campaign
@given(data=st.data())
def test_json_lines(outcomes, tmp_path, chats, data):
    rows = [row.encode() for row in map(json.dumps, data.draw(mutated_values(CHATS) | st.just(CHATS)))] + [
        data.draw(json_files(CHATS[0]))
    ]
    chats(tmp_path / "data.jsonl", b"\n".join(rows), outcomes)


@campaign
@given(data=st.data())
def test_parquet(outcomes, tmp_path, chats, data):
    rows = data.draw(st.just(CHATS) | st.lists(mutated_values(CHATS[0]), min_size=1, max_size=3))
    try:
        table = pyarrow.Table.from_pylist([row for row in rows if isinstance(row, dict)] or CHATS)
        columns = [_cast(column, data.draw(st.sampled_from(TYPES))) for column in table.columns]
        table = pyarrow.table(dict(zip(table.column_names, columns))) if data.draw(st.booleans()) else table
        stream = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(table, stream, compression=data.draw(st.sampled_from(["none", "zstd", "gzip"])))
    except (pyarrow.ArrowException, UnicodeError, OverflowError, TypeError):  # such a file cannot be written
        table, stream = pyarrow.Table.from_pylist(CHATS), pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(table, stream)
    good = stream.getvalue().to_pybytes()
    chats(tmp_path / "data.parquet", data.draw(damaged_bytes(good) | st.just(good)), outcomes)


TYPES = [
    *(None, None, pyarrow.binary(), pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())),
    *(pyarrow.timestamp("ns"), pyarrow.decimal128(38, 3), pyarrow.null(), pyarrow.float16(), pyarrow.uint64()),
    *(pyarrow.list_(pyarrow.string()), pyarrow.map_(pyarrow.string(), pyarrow.string()), pyarrow.duration("s")),
]


def _cast(column: pyarrow.ChunkedArray, to: pyarrow.DataType | None) -> pyarrow.ChunkedArray | pyarrow.Array:
    if to is None:
        return column
    try:
        return column.cast(to)
    except pyarrow.ArrowException:
        return pyarrow.nulls(len(column), to)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Write a file and tokenise it as conversations."""
    tokenizer = byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))

    def read(file: Path, content: bytes, outcomes: Outcomes) -> None:
        file.write_bytes(content)
        entry = Dataset(path=str(file), type="conversation")
        message = outcomes.read(lambda: tokenize((entry,), tokenizer, file.parent / "cache"))
        assert message is None or str(file) in message

    return read


@campaign
@given(data=st.data())
def test_files_of_a_run(outcomes, tmp_path_factory, run, data):
    """The files that `report` reads: metrics.jsonl, samples, counts, config.json, a profile's times."""
    name = data.draw(st.sampled_from(sorted(run)))
    lines = run[name].decode().splitlines() if name.endswith(".jsonl") else [run[name].decode()]
    at = data.draw(st.integers(0, len(lines) - 1))
    changed = data.draw(json_files(json.loads(lines[at])))
    folder = tmp_path_factory.getbasetemp() / "run"
    for file, content in run.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)
    (folder / name).write_bytes(b"\n".join([*map(str.encode, lines[:at]), changed, *map(str.encode, lines[at + 1 :])]))
    outcomes.read(lambda: report._main([str(folder)], str(folder / "report.html")))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = run_folder(tmp_path_factory.mktemp("runs") / "run", steps=3)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.json*")}
