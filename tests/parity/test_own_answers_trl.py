"""A student's answers, scored by teachers that see other prompts: the loss is the one of TRL's GKD trainer."""

import jax
import numpy as np
import pytest
from completion_server import CompletionServer
from tiny import byte_tokenizer, save_torch_model

from jaxtune.config.schema import Config, DataOptions, ModelOptions, TrainOptions
from jaxtune.data.formats.prompts import Prompt
from jaxtune.errors import UserError
from jaxtune.inference.generation import Completion
from jaxtune.objectives.distillation import distillation
from jaxtune.objectives.options import DistillOptions
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.precision.options import PrecisionOptions
from jaxtune.rollout.own_answers import make_score_answers
from jaxtune.scoring.teacher_scores import declare_teachers
from jaxtune.training.assembly import forward_of
from jaxtune.training.step import make_eval_step
from jaxtune.weights.base import read_base
from jaxtune.weights.model import declare_model
from jaxtune.weights.values import start_parameters

torch = pytest.importorskip("torch", reason="the reference is TRL, which needs torch (Python 3.11 here)")
gkd = pytest.importorskip("trl.experimental.gkd", reason="the reference is TRL, which needs torch (Python 3.11 here)")
server_distillation = pytest.importorskip("trl.experimental.server_distillation.server_distillation_trainer")
TEMPERATURE, BETA = 0.8, 0.3
PROMPTS = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]]
HINTED = [[5, 20, 21, 6, 7], [22, 8], [], [13, 14]]  # a teacher without a prompt of its own sees the student's
ANSWERS = [[1, 2, 3], [4], [30, 31, 32, 33], [34, 35]]


def torch_loss(student, teachers, vocabulary: int) -> float:
    """Compute TRL's loss of all answers, each by its own teacher, without padding and after its own prompt."""
    losses = []
    for prompt, hinted, answer, teacher in zip(PROMPTS, HINTED, ANSWERS, teachers):
        with torch.no_grad():
            logits = [
                model(torch.tensor([[*given, *answer]])).logits[:, len(given) - 1 : -1, :vocabulary]
                for model, given in ((student, prompt), (teacher, hinted or prompt))
            ]
        how = {"beta": BETA, "temperature": TEMPERATURE, "reduction": "sum"}
        losses.append(gkd.GKDTrainer.generalized_jsd_loss(*logits, torch.zeros(1, len(answer)), **how).item())
    return sum(losses) / sum(map(len, ANSWERS))


def ours(folder, tokenizer, options: DistillOptions):
    """Return our function that scores answers, and a function (rows, prompts of the teacher) -> loss of ANSWERS."""
    mesh_options = MeshOptions(data=2, fsdp=2, tensor=2)
    config = Config(
        model=ModelOptions(path=str(folder / "student"), dtype="float32"),
        data=DataOptions(seq_len=16),
        train=TrainOptions(micro_batch_size=1, grad_accum_steps=2),
        mesh=mesh_options,
        precision=PrecisionOptions("fp32"),
        distill=options,
    )
    mesh = make_mesh(mesh_options, jax.devices())
    model = declare_model(read_base(config), config, mesh)
    objective = distillation(options)
    declared = declare_teachers(config, tokenizer, model.spec.vocabulary, mesh)
    score = make_score_answers(config, model, objective, declared)
    trained, _, frozen = start_parameters(model, config)
    step = jax.jit(make_eval_step(forward_of(config, model), objective))

    def loss_of(rows, hinted) -> float:
        prompts = [Prompt("", tokens, row, teacher_tokens=hint) for tokens, row, hint in zip(PROMPTS, rows, hinted)]
        batch = score(trained, frozen, prompts, [Completion(tokens, True) for tokens in ANSWERS])
        sums = step(trained, frozen, batch, {})
        assert sums.weight == sum(map(len, ANSWERS))
        return float(sums.loss / sums.weight)

    return score, loss_of


@pytest.mark.parametrize("named", [(), ("wide", "narrow", "narrow", "wide")], ids=["one teacher", "two teachers"])
def test_the_loss_of_answers_is_that_of_trl(tmp_path, named):
    tokenizer = byte_tokenizer(tmp_path / "student")
    student, teachers = save_torch_model("qwen3, yarn rope, tied", tmp_path / "student"), {}
    for name, factor in (("wide", 1.3), ("narrow", 0.7))[: 2 if named else 1]:
        byte_tokenizer(tmp_path / name)
        teachers[name] = save_torch_model("qwen3, yarn rope, tied", tmp_path / name)
        with torch.no_grad():
            for parameter in teachers[name].parameters():
                parameter.mul_(factor)
        teachers[name].save_pretrained(tmp_path / name)
    place = ",".join(f"{name}={tmp_path / name}" for name in teachers) if named else str(tmp_path / "wide")
    vocabulary = student.config.vocab_size
    options = DistillOptions(place, 1.0, "js", js_beta=BETA, temperature=TEMPERATURE, top_k=vocabulary)
    score, loss_of = ours(tmp_path, tokenizer, options)
    loss = loss_of([{"teacher": name} for name in named or [None] * 4], HINTED)
    expected = torch_loss(student, [teachers[name] for name in named or ["wide"] * 4], vocabulary)
    assert expected > 0.01
    np.testing.assert_allclose(loss, expected, atol=1e-5)
    if named:
        with pytest.raises(
            UserError, match="column 'teacher' is None, which distill.teacher does not have: wide, narr"
        ):
            score({}, {}, [Prompt("", [1], {})], [Completion([2], True)])


def test_the_loss_of_a_teacher_on_a_server_is_that_of_trl(tmp_path):
    """Its likeliest tokens, and all others as one: TRL's ServerDistillationTrainer with the forward KL divergence."""
    tokenizer = byte_tokenizer(tmp_path / "student")
    student, teacher = (save_torch_model("qwen3, yarn rope, tied", tmp_path / name) for name in ("student", "teacher"))
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.3)
    count = 5

    def log_probs(model, tokens):
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([tokens])).logits.double(), -1)[0, :-1]

    def said(prompt, most):
        """As vLLM: the likeliest tokens and the prompt's own, in any order, with their ranks."""
        places: list[dict[str, dict[str, float]] | None] = [None]
        for of_place, token in zip(log_probs(teacher, prompt), prompt[1:]):
            ranks = torch.argsort(of_place, descending=True).tolist()
            listed = {token, *ranks[:most]}
            places.append({str(t): {"logprob": of_place[t].item(), "rank": ranks.index(t) + 1} for t in listed})
        return places

    trainer = object.__new__(server_distillation.ServerDistillationTrainer)
    trainer.loss_add_tail = True
    losses = []
    for prompt, answer in zip(PROMPTS, ANSWERS):
        of_student, of_teacher = (
            log_probs(model, [*prompt, *answer])[len(prompt) - 1 :] for model in (student, teacher)
        )
        best, tokens = of_teacher.topk(count)
        result = {"topk_logprobs": best[None], "topk_token_ids": tokens[None]}
        loss = trainer._compute_server_forward_kl_loss(result, of_student[None], torch.tensor([answer]))
        losses.append(loss.item() * len(answer))
    with CompletionServer(lambda prompt, seed: [0], prompt_log_probs=said) as server:
        options = DistillOptions(server.url, 1.0, "forward_kl", top_k=count)
        _, loss_of = ours(tmp_path, tokenizer, options)
        found = loss_of([{}] * 4, [()] * 4)
        assert len(server.requests) == len(PROMPTS)
        with pytest.raises(UserError, match="does not return the 5 likeliest tokens"):
            server.prompt_log_probs = lambda prompt, most: said(prompt, 3)
            loss_of([{}] * 4, [()] * 4)
    expected = sum(losses) / sum(map(len, ANSWERS))
    assert expected > 0.01
    np.testing.assert_allclose(found, expected, atol=1e-5)
