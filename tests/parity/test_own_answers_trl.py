"""A student's answers, scored by a teacher that sees other prompts: the loss is the one of TRL's GKD trainer."""

import jax
import numpy as np
import pytest
from tiny import byte_tokenizer, save_torch_model

from jaxtune.config.schema import Config, DataOptions, ModelOptions, TrainOptions
from jaxtune.data.formats.prompts import Prompt
from jaxtune.inference.generation import Completion
from jaxtune.objectives.distillation import distillation
from jaxtune.objectives.options import DistillOptions
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.precision.options import PrecisionOptions
from jaxtune.rollout.own_answers import make_score_answers
from jaxtune.scoring.teacher_scores import declare_teacher
from jaxtune.training.assembly import forward_of
from jaxtune.training.step import make_eval_step
from jaxtune.weights.base import read_base
from jaxtune.weights.model import declare_model
from jaxtune.weights.values import start_parameters

torch = pytest.importorskip("torch", reason="the reference is TRL, which needs torch (Python 3.11 here)")
gkd = pytest.importorskip("trl.experimental.gkd", reason="the reference is TRL, which needs torch (Python 3.11 here)")
TEMPERATURE, BETA = 0.8, 0.3
PROMPTS = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]]
HINTED = [[5, 20, 21, 6, 7], [22, 8], [], [13, 14]]  # a teacher without a prompt of its own sees the student's
ANSWERS = [[1, 2, 3], [4], [30, 31, 32, 33], [34, 35]]


def torch_loss(student, teacher, vocabulary: int) -> float:
    """Compute TRL's loss of all answers, each without padding and after its own prompt."""
    losses = []
    for prompt, hinted, answer in zip(PROMPTS, HINTED, ANSWERS):
        with torch.no_grad():
            logits = [
                model(torch.tensor([[*given, *answer]])).logits[:, len(given) - 1 : -1, :vocabulary]
                for model, given in ((student, prompt), (teacher, hinted or prompt))
            ]
        how = {"beta": BETA, "temperature": TEMPERATURE, "reduction": "sum"}
        losses.append(gkd.GKDTrainer.generalized_jsd_loss(*logits, torch.zeros(1, len(answer)), **how).item())
    return sum(losses) / sum(map(len, ANSWERS))


def test_the_loss_of_answers_is_that_of_trl(tmp_path):
    tokenizer = byte_tokenizer(tmp_path / "student")
    byte_tokenizer(tmp_path / "teacher")
    student, teacher = (save_torch_model("qwen3, yarn rope, tied", tmp_path / name) for name in ("student", "teacher"))
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.3)
    teacher.save_pretrained(tmp_path / "teacher")
    vocabulary = student.config.vocab_size
    mesh_options = MeshOptions(data=2, fsdp=2, tensor=2)
    config = Config(
        model=ModelOptions(path=str(tmp_path / "student"), dtype="float32"),
        data=DataOptions(seq_len=16),
        train=TrainOptions(micro_batch_size=1, grad_accum_steps=2),
        mesh=mesh_options,
        precision=PrecisionOptions("fp32"),
        distill=DistillOptions(
            str(tmp_path / "teacher"), 1.0, "js", js_beta=BETA, temperature=TEMPERATURE, top_k=vocabulary
        ),
    )
    mesh = make_mesh(mesh_options, jax.devices())
    model = declare_model(read_base(config), config, mesh)
    objective = distillation(config.distill)
    declared = declare_teacher(config, tokenizer, model.spec.vocabulary, mesh)
    score = make_score_answers(config, model, objective, declared)
    trained, _, frozen = start_parameters(model, config)
    prompts = [Prompt("", tokens, {}, teacher_tokens=hinted) for tokens, hinted in zip(PROMPTS, HINTED)]
    batch = score(trained, frozen, prompts, [Completion(tokens, True) for tokens in ANSWERS])
    sums = jax.jit(make_eval_step(forward_of(config, model), objective))(trained, frozen, batch, {})
    assert sums.weight == sum(map(len, ANSWERS))
    expected = torch_loss(student, teacher, vocabulary)
    assert expected > 0.01
    np.testing.assert_allclose(sums.loss / sums.weight, expected, atol=1e-5)
