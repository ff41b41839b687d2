"""Benchmark tasks: log-likelihoods, greedy flags and texts equal the harness's own class for transformers."""

import jax
import pytest
from benchmark_tasks import TASK_OPTIONS, write_tasks
from nightly_rows import nightly
from tiny import byte_tokenizer, save_torch_model

from jaxtune.config.schema import Config, DataOptions, ModelOptions, TrainOptions
from jaxtune.evaluation.validation import open_evaluated_model
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.precision.options import PrecisionOptions

pytest.importorskip("lm_eval", reason="lm-evaluation-harness (pip install lm-eval) is not installed")
FAMILY = "llama, llama3 rope, untied, biases"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model, a tokenizer that adds a begin-of-text token, and tasks."""
    folder = tmp_path_factory.mktemp("model")
    save_torch_model(FAMILY, folder, max_position_embeddings=128)
    byte_tokenizer(folder, bos="<|endoftext|>")
    (folder / "tasks").mkdir()
    write_tasks(folder / "tasks")
    return folder


@pytest.fixture(scope="module")
def theirs(folder):
    """lm-eval's own model class on the folder."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(str(folder), device="cpu", dtype="float32", batch_size=2)


def ours(folder, mesh):
    from jaxtune.evaluation.decoder_lm import DecoderLM

    model = ModelOptions(path=str(folder), dtype="float32")
    how = {"train": TrainOptions(micro_batch_size=4), "precision": PrecisionOptions("fp32")}
    config = Config(model=model, data=DataOptions(seq_len=128), **how)
    return DecoderLM(
        open_evaluated_model(config, mesh, None, None, str(folder), reference=False), folder, mesh, chat=True
    )


def asked(folder, lm, chat: bool) -> dict[str, list]:
    """Return the requests of each task, and the model's responses."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    how = {"num_fewshot": 2, "task_manager": manager, "bootstrap_iters": 0, "apply_chat_template": chat}
    samples = simple_evaluate(model=lm, tasks=list(TASK_OPTIONS), **how)["samples"]
    return {name: [(sample["arguments"], sample["resps"]) for sample in samples[name]] for name in TASK_OPTIONS}


@pytest.mark.parametrize(
    "mesh",
    [
        MeshOptions(),
        nightly(MeshOptions(data=2, fsdp=2, tensor=2)),
        nightly(MeshOptions(fsdp=2, context=2, sequence=2)),
    ],
    ids=str,
)
def test_tasks_are_answered_as_by_hflm(folder, theirs, mesh):
    """With a chat template on several devices. The longest texts exceed the 128 positions and are cut."""
    several = mesh != MeshOptions()
    devices = make_mesh(mesh, jax.devices() if several else jax.devices()[:1])
    found, expected = (asked(folder, lm, several) for lm in (ours(folder, devices), theirs))
    for name in TASK_OPTIONS:
        for (question, mine), (same, others) in zip(found[name], expected[name], strict=True):
            assert question == same
            for (one,), (another,) in zip(mine, others, strict=True):
                if name == "tiny_choice":
                    assert abs(one[0] - another[0]) < 1e-4 and one[1] == another[1]
                elif name == "tiny_text":
                    assert abs(one - another) < 1e-6 * abs(another)
                else:
                    assert one == another


def test_texts_end_and_tokens_are_greedy_where_those_of_hflm_are(folder, theirs, one_device):
    from lm_eval.api.instance import Instance

    lm, prompts = ours(folder, one_device), ["say ", "red and", "x" * 300]

    def texts(asked, **options) -> list[str]:
        requests = [Instance("generate_until", {}, (prompt, options), 0) for prompt in prompts]
        return asked.generate_until(requests, disable_tqdm=True)

    whole = texts(theirs, until=[], max_gen_toks=24)
    assert texts(lm, until=[], max_gen_toks=24) == whole
    stops = sorted({text[len(text) // 2 :][:2] for text in whole})
    ended = texts(theirs, until=stops, max_gen_toks=24)
    assert texts(lm, until=stops, max_gen_toks=24) == ended and all(map(len, whole)) and ended != whole
    sampled = [texts(lm, until=[], max_gen_toks=24, do_sample=True, temperature=t) for t in (1e-4, 2.0)]
    assert sampled[0] == whole != sampled[1]
    # Every token after a prompt; one is the likeliest, and it also occurs twice in a row.
    context = lm.tok_encode(prompts[0])
    every = [(None, context, [token]) for token in range(256)]
    best = [greedy for _, greedy in theirs._loglikelihood_tokens(every, disable_tqdm=True)].index(True)
    every.append((None, context, [best, best]))
    found, expected = (one._loglikelihood_tokens(every, disable_tqdm=True) for one in (lm, theirs))
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected] and found[best][1]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)
