"""Documents packed into a row are computed as in separate rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import logits_on_host, make_batch, tokens
from tiny import read_model, save_torch_model

from jaxtune.models.decoder import bind
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.score import score
from jaxtune.objectives.cross_entropy import cross_entropy


@pytest.mark.parametrize(
    "family",
    [
        "deepseek_v3, latent attention",
        "gpt_oss, stacked experts",
        "llama, llama3 rope, untied, biases",
        "ministral3, growing queries",
        "qwen3, a period of two",
        "qwen3_next, a dense layer",
    ],
)
def test_packed_equals_unpacked(family, one_device, tmp_path):
    save_torch_model(family, tmp_path)
    model, parameters, _ = read_model(tmp_path, one_device)
    lengths = [1, 20, 7, 30]
    rows = tokens(1, 64)  # the last 6 positions are padding
    packed = make_batch(rows, one_device, lengths)

    @jax.jit
    def total(parameters, batch):
        with jax.default_matmul_precision("highest"):
            scores = score(
                bind(model.graph, parameters), batch, ForwardOptions(jnp.dtype("float32")), head_gradient=True
            )
            return cross_entropy().loss(scores, batch).loss

    together = logits_on_host(model, parameters, packed)
    loss, gradients = jax.value_and_grad(total)(parameters, packed)
    alone_loss, alone_gradients, start = 0.0, jax.tree.map(jnp.zeros_like, parameters), 0
    for length in lengths:
        alone = np.zeros_like(rows)
        alone[:, :length] = rows[:, start : start + length]
        batch = make_batch(alone, one_device, [length])
        assert (
            np.abs(logits_on_host(model, parameters, batch)[:, :length] - together[:, start : start + length]).max()
            <= 1e-5
        )
        part, part_gradients = jax.value_and_grad(total)(parameters, batch)
        alone_loss, alone_gradients = alone_loss + part, jax.tree.map(jnp.add, alone_gradients, part_gradients)
        start += length
    assert abs(float(loss) - float(alone_loss)) <= 1e-5 * float(loss)
    for name, gradient in alone_gradients.items():
        assert jnp.abs(gradients[name] - gradient).max() <= 1e-5 * (jnp.abs(gradient).max() + 1e-6), name
