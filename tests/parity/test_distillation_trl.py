"""The divergence from a teacher with all tokens kept equals TRL's GKD trainer's, in values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.models.head.divergence import Divergence, Head, linear_divergence

torch = pytest.importorskip("torch", reason="the reference is TRL, which needs torch (Python 3.11 here)")
gkd = pytest.importorskip("trl.experimental.gkd", reason="the reference is TRL, which needs torch (Python 3.11 here)")
TOKENS, VOCABULARY, WIDTH = 24, 40, 16
KINDS = {
    0.0: Divergence("forward_kl"),
    0.5: Divergence("js", 0.5),
    0.2: Divergence("js", 0.2),
    1.0: Divergence("reverse_kl"),
}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("beta", KINDS)
def test_with_all_tokens_it_is_generalized_jsd_loss(beta, temperature):
    random = np.random.default_rng(0)
    hidden, head = (random.normal(size=(n, WIDTH)).astype(np.float32) / 2 for n in (TOKENS, VOCABULARY))
    teacher = random.normal(size=(TOKENS, VOCABULARY)).astype(np.float32) * 2
    trained = np.arange(TOKENS) % 3 > 0
    theirs = [torch.tensor(x, requires_grad=True) for x in (hidden, head)]
    labels = torch.tensor(np.where(trained, 0, -100))
    expected = gkd.GKDTrainer.generalized_jsd_loss(
        (theirs[0] @ theirs[1].T)[None], torch.tensor(teacher)[None], labels[None], beta, temperature
    )
    expected.backward()

    tokens = np.argsort(-teacher, axis=1).astype(np.int32)
    log_probs = np.take_along_axis(np.asarray(jax.nn.log_softmax(teacher / temperature)), tokens, axis=1)
    log_probs = np.concatenate([log_probs, np.full((TOKENS, 1), -1e4, np.float32)], axis=1)
    kind = Divergence(KINDS[beta].kind, KINDS[beta].beta, temperature)

    @jax.value_and_grad
    def ours(parts):
        with jax.default_matmul_precision("highest"):
            _, found = linear_divergence(
                *parts, jnp.zeros(TOKENS, jnp.int32), tokens, log_probs, trained, Head(VOCABULARY), kind, tile=8
            )
        return found.sum() / trained.sum()

    value, gradients = ours((jnp.array(hidden), jnp.array(head)))
    assert abs(value - expected.item()) <= 1e-5
    for found, parameter in zip(gradients, theirs):
        np.testing.assert_allclose(found, parameter.grad.numpy(), atol=1e-5)
