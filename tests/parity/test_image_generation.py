"""Prompts with images are continued as transformers continues them, batched with prompts of other sizes."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from images import draw_sample, gemma4_inputs, torch_inputs
from nightly_rows import nightly
from parity.test_vision import read_seeing
from tiny import save_torch_model

from jaxtune.image_layout import ImageRef
from jaxtune.inference.decode import Sampling
from jaxtune.inference.generation import make_generate
from jaxtune.inference.prompt_images import PromptImages

NEW = 8


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_5, inside a model that sees",  # recurrent layers too
        nightly("qwen3_vl, deepstack"),
        nightly("qwen2_5_vl, windows"),
        nightly("qwen3_vl_moe, a dense layer"),
        nightly("gemma4, inside a model that sees"),
        nightly("ernie4_5_vl_moe, experts of images"),
    ],
)
def test_greedy_tokens_after_images(family, tmp_path, one_device):
    """Prompts with no, two and one image in a batch get the tokens that transformers computes for each by itself."""
    import torch

    reference = save_torch_model(family, tmp_path).eval()
    model, parameters, _ = read_seeing(tmp_path, one_device)
    vision = model.spec.vision
    assert vision is not None
    samples = [draw_sample(vision, 13 + number, grids, number) for number, grids in enumerate(GRIDS)]
    expected = []
    for sample in samples:
        inputs = (gemma4_inputs if family.startswith("gemma4") else torch_inputs)(sample, vision, torch.float32)
        with torch.no_grad():
            made = reference.generate(**inputs, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        expected.append(made[0, -NEW:].tolist())
    seen = {
        f"{number}-{i}": one.patches for number, sample in enumerate(samples) for i, one in enumerate(sample.images)
    }
    reader: Any = SimpleNamespace(layout=vision.layout, read_patches=lambda ref: seen[ref.place])
    images = [
        tuple(ImageRef(f"{number}-{i}", one.grid) for i, one in enumerate(sample.images))
        for number, sample in enumerate(samples)
    ]
    how = {"sampling": Sampling(temperature=0.0), "dtype": jnp.dtype("float32")}
    generate = make_generate(model.graph, model.spec, max_new_tokens=NEW, **how)
    with jax.default_matmul_precision("highest"):
        steps = generate(
            parameters, [sample.tokens.tolist() for sample in samples], images=PromptImages(reader, images)
        )
        found = np.stack([step.tokens for step in steps], axis=1).tolist()
    assert found == expected


GRIDS = [[], [(2, 4), (6, 4)], [(4, 8)]]
