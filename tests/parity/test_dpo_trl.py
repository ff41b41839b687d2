"""DPO (arXiv:2305.18290) of adapters, with the base model as the reference: TRL's loss and gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import make_batch
from tiny import byte_tokenizer, read_model, save_torch_model

from jaxtune.lora.options import LoraOptions
from jaxtune.objectives.options import PreferenceOptions
from jaxtune.precision.options import PrecisionOptions
from jaxtune.training.assembly import assemble

trl = pytest.importorskip("trl", reason="the reference is TRL, which needs torch (Python 3.11 here)")
datasets, peft, torch = (pytest.importorskip(name) for name in ("datasets", "peft", "torch"))
BETA, PROMPT, CHOSEN, REJECTED = 0.3, "say a colour", " deep blue", " no"


def test_loss_and_gradients_are_those_of_trl(one_device, tmp_path):
    base = save_torch_model("qwen3, yarn rope, tied", tmp_path / "base")
    tokenizer = byte_tokenizer(tmp_path / "base")
    lora, rng = LoraOptions(enabled=True, rank=4, alpha=8.0), np.random.default_rng(0)
    model, frozen, config = read_model(tmp_path / "base", one_device, lora=lora)
    adapters = {name: rng.normal(size=p.shape).astype("float32") * 0.1 for name, p in model.trained.items()}
    arguments = trl.DPOConfig(str(tmp_path / "out"), beta=BETA, use_cpu=True, report_to=[], bf16=False)
    pairs = datasets.Dataset.from_list([{"prompt": PROMPT, "chosen": CHOSEN, "rejected": REJECTED}])
    options = peft.LoraConfig(r=4, lora_alpha=8.0, target_modules="all-linear")
    trainer = trl.DPOTrainer(base, args=arguments, train_dataset=pairs, processing_class=tokenizer, peft_config=options)
    theirs = {name.replace(".default", ""): value for name, value in trainer.model.named_parameters()}
    places = [(name, at, place.name) for name, p in model.trained.items() for at, place in p.elements()]
    for name, index, hf_name in places:
        theirs[f"base_model.model.{hf_name}"].data[:] = torch.tensor(adapters[name][index])
    expected = trainer.compute_loss(trainer.model.eval(), next(iter(trainer.get_train_dataloader())))
    expected.backward()

    ids = [tokenizer(PROMPT + answer)["input_ids"] + [tokenizer.eos_token_id] for answer in (CHOSEN, REJECTED)]
    rows = np.resize(np.array([*ids[0], *ids[1]]), (1, 64))
    batch = make_batch(rows, one_device, [len(one) for one in ids])
    answers = batch["positions"] >= len(tokenizer(PROMPT)["input_ids"]) - 1
    batch |= {"loss_weight": batch["loss_weight"] * answers}
    config = dataclasses.replace(
        config, precision=PrecisionOptions("fp32"), preference=PreferenceOptions("sigmoid", beta=BETA)
    )
    program = assemble(model.base, config, one_device)
    batch = jax.tree.map(lambda column: column[None], batch)
    with jax.default_matmul_precision("highest"):
        summed = jax.jit(program.gradients)(adapters, frozen, batch, jnp.int32(0))
    assert abs(float(summed.sums.loss) - expected.item()) <= 1e-5 * expected.item()
    for name, index, hf_name in places:
        gradient = theirs[f"base_model.model.{hf_name}"].grad.numpy()
        assert np.abs(summed.gradients[name][index] - gradient).max() <= 1e-5 * np.abs(gradient).max(), hf_name
