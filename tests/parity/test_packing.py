"""Documents packed into a row are computed as in separate rows."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import make_batch, sums_and_logits, tokens
from nightly_rows import every_family
from tiny import read_model, save_torch_model

from jaxtune.objectives.cross_entropy import cross_entropy

# One family for each kind of layer and of cache.
OF_EACH_KIND = (
    "deepseek_v3, latent attention",
    "falcon_h1, attention beside Mamba-2",
    "lfm2, biases",
    "llama, llama3 rope, untied, biases",
    "olmo_hybrid, delta nets and attention without rope",
)


@pytest.mark.parametrize("family", every_family(OF_EACH_KIND))
def test_packed_equals_unpacked(family, one_device, tmp_path):
    save_torch_model(family, tmp_path)
    model, parameters, _ = read_model(tmp_path, one_device)
    lengths = [1, 20, 7, 30]
    rows = tokens(1, 64)  # the last 6 positions are padding

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def total(parameters, batch):
        sums, logits = sums_and_logits(model, cross_entropy(), parameters, batch)
        return sums.loss, logits

    (loss, together), gradients = total(parameters, make_batch(rows, one_device, lengths))
    alone_loss, alone_gradients, start = 0.0, jax.tree.map(jnp.zeros_like, parameters), 0
    for length in lengths:
        alone = np.zeros_like(rows)
        alone[:, :length] = rows[:, start : start + length]
        (part, logits), part_gradients = total(parameters, make_batch(alone, one_device, [length]))
        assert jnp.abs(logits[:, :length] - together[:, start : start + length]).max() <= 1e-5
        alone_loss, alone_gradients = alone_loss + part, jax.tree.map(jnp.add, alone_gradients, part_gradients)
        start += length
    assert abs(float(loss) - float(alone_loss)) <= 1e-5 * float(loss)
    for name, gradient in alone_gradients.items():
        # The gradient of a layer's scale is one sum over all activations, here near 0: its rounding may be 1e-6.
        rounding = 1e-6 if re.search(r"blocks\.\d+\.scale$", name) else 1e-11
        assert jnp.abs(gradients[name] - gradient).max() <= 1e-5 * jnp.abs(gradient).max() + rounding, name
