"""Weights that a quantized export leaves unquantized; llama.cpp's converter finds all that it reads."""

import dataclasses
import json
import os
import re
import shutil
import time
from functools import partial

import numpy as np
import pytest
from runs import write_conversations
from safetensors import safe_open
from tiny import CHATML, byte_tokenizer, write_model_folder

from jaxtune.checkpoint.storage import RemoteFolder, open_folder, upload
from jaxtune.config.schema import Config, DataOptions, Dataset, ModelOptions, TrainOptions
from jaxtune.errors import UserError
from jaxtune.evaluation.export_difference import loss_difference
from jaxtune.export import check_output
from jaxtune.exports.vllm_limits import adapter_limit
from jaxtune.exports.write import UNFINISHED, export, export_full
from jaxtune.hf import SCHEMES, quantization_config
from jaxtune.host.run_folder import RunFolder
from jaxtune.lora.options import LoraOptions
from jaxtune.quant.options import ServeOptions
from jaxtune.weights.base import read_base
from jaxtune.weights.model import declare_model
from jaxtune.weights.quantizable import quantizable
from jaxtune.weights.values import frozen_parameters, initial_parameters, read_parameters

WIDE = dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=1, head_dim=64)
MIXTURE = dict(WIDE, moe_intermediate_size=128, num_experts=2, num_experts_per_tok=1, mlp_only_layers=[1])


def declare_folder(mesh, folder, lora=LoraOptions(), **options):
    config = Config(model=ModelOptions(path=str(folder), **options), data=DataOptions(seq_len=32), lora=lora)
    return declare_model(read_base(config), config, mesh, train=False), config


def select(model, kind):
    """Return the selected weights, and the layers that config.json lists as unquantized."""
    selected = quantizable(model.spec, model.whole, SCHEMES[kind], f"--quantize={kind}")
    written = quantization_config(SCHEMES[kind], "bfloat16", selected.unquantized)
    names = [written[key] for key in ("ignore", "modules_to_not_convert", "llm_int8_skip_modules") if key in written]
    return selected, set(*names)


def test_what_blocks_do_not_divide_stays_with_what_is_multiplied_beside_it(tmp_path, one_device):
    """FP8's blocks have 128 rows, more than the 64 of keys and values."""
    model, _ = declare_folder(one_device, write_model_folder(tmp_path, **WIDE))
    selected, unquantized = select(model, "fp8")
    left = [f"model.layers.{i}.self_attn.{name}_proj" for i in range(2) for name in "qkv"]
    assert unquantized == {"lm_head", *left}
    ours = [f"model.layers.{i}.{name}.weight" for i in range(2) for name in ("self_attn.o_proj", "mlp.down_proj")]
    assert selected.weights.issuperset(ours) and len(selected.weights) == 8
    said = selected.left_out
    assert "blocks of 128 x 128 do not divide 64 x 128" in said
    assert "layers.*.self_attn.q_proj.weight (servers fuse it with model.layers.*.self_attn.v_proj.weight)" in said


@pytest.mark.parametrize("kind", SCHEMES)
def test_experts_are_quantized_where_they_can_be_read_so(tmp_path, one_device, kind):
    model, _ = declare_folder(one_device, write_model_folder(tmp_path, "Qwen3Moe", **MIXTURE))
    if kind in ("nvfp4", "mxfp4"):
        with pytest.raises(UserError, match=r"experts\.0\.\w+_proj\.weight .*experts only in fp8, int4, int8"):
            select(model, kind)
        return
    selected, skipped = select(model, kind)
    assert {"lm_head", "model.layers.0.mlp.gate"} <= skipped
    experts = any(".experts." in name for name in selected.weights)
    assert experts == ("model.layers.0.mlp.experts" not in skipped) == (kind != "nf4")


def test_a_model_that_no_block_divides_is_refused(tmp_path, one_device):
    model, _ = declare_folder(one_device, write_model_folder(tmp_path))
    with pytest.raises(UserError, match=r"--quantize=nf4: no linear layer .*blocks of 1 x 64 do not divide 32 x 32"):
        select(model, "nf4")


@pytest.mark.parametrize("kind", ["mxfp4", "int4"])
def test_an_odd_number_of_blocks_is_read_again(tmp_path, one_device, kind):
    """Codes are packed, so that the file has fewer columns than a block divides."""
    odd = 32 if kind == "mxfp4" else 128
    sizes = dict(hidden_size=3 * odd, intermediate_size=odd, num_attention_heads=1, head_dim=odd)
    folder = write_model_folder(tmp_path / "model", num_hidden_layers=1, num_key_value_heads=1, **sizes)
    model, config = declare_folder(one_device, folder, dtype="float32")
    export_full(model, read_parameters(model, model.whole), config, tmp_path / "out", kind)
    again, _ = declare_folder(one_device, tmp_path / "out", dtype="float32")
    assert len(again.quantized) == 7


def test_nan_is_not_quantized(tmp_path, one_device):
    model, config = declare_folder(one_device, write_model_folder(tmp_path, **WIDE))
    parameters = read_parameters(model, model.whole)
    name = next(name for name in parameters if name.endswith("mlp.down.weight"))
    parameters[name] = parameters[name] * np.nan
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.down_proj\.weight holds NaN"):
        export_full(model, parameters, config, tmp_path / "out", "nf4")
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_without_validation_data_the_loss_is_of_training_data_and_without_those_logits_are_compared(
    tmp_path, one_device, caplog
):
    folder, chats = write_model_folder(tmp_path / "model", **WIDE), write_conversations(tmp_path / "chat.jsonl")
    data = DataOptions(seq_len=64, datasets=(Dataset(path=str(chats), type="conversation"),))
    train = TrainOptions(output_dir=str(tmp_path), micro_batch_size=4)
    config = Config(model=ModelOptions(path=str(folder), dtype="float32"), data=data, train=train)
    model = declare_model(read_base(config), config, one_device, low_precision=False)
    parameters = read_parameters(model, model.whole)
    export_full(model, parameters, config, tmp_path / "out", "int4")
    arguments = (model, parameters, config, tmp_path / "out", "int4")
    match = re.fullmatch(r"training loss (\S+) as trained, (\S+) as written in int4", loss_difference(*arguments))
    before, after = map(float, match.groups())
    assert 0 < abs(before - after) < 0.1
    chats.unlink()
    shutil.rmtree(tmp_path / "cache")
    assert re.match(r"over 64 random tokens the logits, .* differ by 0\.\d+ at most$", loss_difference(*arguments))
    assert "cannot be read again" in caplog.text and "chat.jsonl" in caplog.text


def test_an_export_is_compared_with_inputs_rounded_as_in_training(tmp_path, one_device):
    folder = write_model_folder(tmp_path / "model", **WIDE)
    serve = ServeOptions("fp8", activations="fp8")
    config = Config(model=ModelOptions(path=str(folder), dtype="float32"), data=DataOptions(seq_len=64), serve=serve)
    model = declare_model(read_base(config), config, one_device)
    parameters = read_parameters(model, model.whole)
    export_full(model, parameters, config, tmp_path / "out", "fp8")
    differences = []
    for compared in (serve, ServeOptions("fp8")):
        options = dataclasses.replace(config, serve=compared)
        said = loss_difference(model, parameters, options, tmp_path / "out", "fp8")
        differences.append(float(re.search(r"differ by (\S+) at most", said)[1]))
    assert differences[0] < differences[1] / 20


@pytest.mark.parametrize("saved", [{}, {"eos_token_id": 256, "top_p": 0.9}])
def test_the_token_that_ends_an_answer_is_where_others_look(tmp_path, one_device, caplog, saved):
    """The base ends texts with another token. A full model names it in its config; for an adapter, log and card do."""
    transformers = pytest.importorskip("transformers")
    folder = write_model_folder(tmp_path / "model", bos_token_id=257, eos_token_id=256)
    byte_tokenizer(folder, eos="<|endoftext|>")
    if saved:
        (folder / "generation_config.json").write_text(json.dumps(saved))
    train, data = TrainOptions(output_dir=str(tmp_path)), DataOptions(seq_len=32)
    for kind, lora in (("hf", LoraOptions()), ("peft", LoraOptions(enabled=True, rank=2))):
        config = Config(model=ModelOptions(path=str(folder), dtype="float32"), data=data, train=train, lora=lora)
        model = declare_model(read_base(config), config, one_device)
        parameters = {**frozen_parameters(model, config), **initial_parameters(model, config)}
        caplog.clear()
        export(model, parameters, config, RunFolder(tmp_path), tmp_path / kind, kind, steps=1, tokens=1)
        generation = transformers.GenerationConfig.from_pretrained(tmp_path / kind)
        assert generation.eos_token_id == [256, 258] and generation.top_p == saved.get("top_p", generation.top_p)
        assert generation.bos_token_id == (None if saved else 257)  # transformers takes it from config.json
        card = (tmp_path / kind / "README.md").read_text()
        assert ("generation_config.eos_token_id = [256, 258]" in card) == (kind == "peft")
        assert ("eos_token_id=[256, 258], or vLLM stop_token_ids=[258]" in caplog.text) == (kind == "peft")


def test_an_export_that_was_killed_is_made_again_and_others_wait(tmp_path, one_device, monkeypatch):
    """An unfinished export has a mark and is replaced; a folder with anything else is not touched."""
    model, config = declare_folder(one_device, write_model_folder(tmp_path / "model"), dtype="float32")
    parameters, output = read_parameters(model, model.whole), tmp_path / "out"
    write = partial(export, model, parameters, config, RunFolder(tmp_path), output, steps=1, tokens=1)
    with pytest.raises(UserError, match="holds other things .* name a new folder"):
        check_output(tmp_path / "model", "hf")

    def killed(*_):
        with pytest.raises(UserError, match=r"out is in use: process \d+ .* or export to another folder"):
            write("hf")
        raise KeyboardInterrupt

    for _ in ("the first time", "over a whole one"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("jaxtune.hf.write_config", killed)
            write("hf")
        assert (output / "model.safetensors").exists() and not (output / "README.md").exists()
        check_output(output, "hf")
        with pytest.raises(UserError, match="holds the export of a whole model; name a new folder for an adapter"):
            check_output(output, "peft")
        write("hf")
        assert {"README.md", "config.json", "model.safetensors"} <= {file.name for file in output.iterdir()}
        assert not list(output.glob(".*"))
        check_output(output, "hf")


def test_a_copy_that_was_killed_is_made_again(tmp_path, monkeypatch):
    for name in ("README.md", "config.json", "model.safetensors"):
        (tmp_path / name).write_text("with jaxtune")
    remote = open_folder("memory://bucket/killed-copy", "--output")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        put = RemoteFolder.put
        patch.setattr(RemoteFolder, "put", lambda *copied: put(*copied) or stop())
        upload(tmp_path, remote, last="README.md", mark=UNFINISHED)
    assert UNFINISHED in remote.names() and len(remote.names()) == 2 and "README.md" not in remote.names()
    check_output(remote, "hf")
    remote.write(UNFINISHED, json.dumps({"process": os.getpid(), "host": "other", "time": time.time()}).encode())
    with pytest.raises(UserError, match="killed-copy is in use: process .* on host other"):
        check_output(remote, "hf")
    remote.write(UNFINISHED, b"")
    upload(tmp_path, remote, last="README.md", mark=UNFINISHED)
    assert sorted(remote.names()) == ["README.md", "config.json", "model.safetensors"]
    check_output(remote, "hf")


def stop():
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        (LoraOptions(rank=16), None),
        (LoraOptions(rank=6), None),
        (LoraOptions(rank=4, rank_pattern=("q_proj=24",)), "vLLM needs --max-lora-rank=32"),
        (LoraOptions(rank=9, init="pissa"), "vLLM needs --max-lora-rank=32"),
        (LoraOptions(rank=513), "its rank, 513, is larger than 512: export the whole model with --merge"),
        (LoraOptions(rank=2, use_dora=True, bias="all"), r"because it has DoRA .* and biases are trained"),
        (LoraOptions(kind="ia3"), "cannot serve this adapter, because it is .IA.³"),
        (LoraOptions(rank=2, modules_to_save=("embed_tokens",)), "modules are trained in full"),
    ],
)
def test_an_adapter_that_vllm_cannot_serve_as_it_is_says_so(tmp_path, one_device, lora, said):
    folder = write_model_folder(tmp_path, "Qwen2", tie_word_embeddings=False)
    model, config = declare_folder(one_device, folder, lora=dataclasses.replace(lora, enabled=True))
    limit = adapter_limit(model, config)
    assert limit is None if said is None else re.search(said, limit)


def test_an_adapter_of_experts_says_that_vllm_cannot_serve_it_on_cpus(tmp_path, one_device):
    folder = write_model_folder(tmp_path, "Qwen3Moe", **MIXTURE)
    model, config = declare_folder(one_device, folder, lora=LoraOptions(enabled=True, rank=20))
    assert re.search("--max-lora-rank=32 .*; .*on CPUs cannot serve adapters of experts", adapter_limit(model, config))


@pytest.mark.parametrize(("kind", "tied"), [("Qwen3", True), ("Llama", False)])
def test_llama_cpp_finds_all_that_its_converter_reads(tmp_path, one_device, kind, tied):
    """Checked by the converter's package: architecture, tensors, special tokens, chat template; nothing quantized."""
    gguf = pytest.importorskip("gguf")
    folder = write_model_folder(tmp_path / "model", kind, tie_word_embeddings=tied)
    model, config = declare_folder(one_device, folder, dtype="bfloat16")
    export_full(model, read_parameters(model, model.whole), config, tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["architectures"] == [f"{kind}ForCausalLM"] and "quantization_config" not in saved
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], len(model.spec.layers))
    with safe_open(tmp_path / "out" / "model.safetensors", "numpy") as file:
        names_there = {name: names.get_name(name, (".weight", ".bias")) for name in file.keys()}  # noqa: SIM118
        assert {file.get_slice(name).get_dtype() for name in names_there} == {"BF16"}
    assert None not in names_there.values() and len(set(names_there.values())) == len(names_there)
    assert ("output.weight" in names_there.values()) != tied and "token_embd.weight" in names_there.values()
    vocabulary = gguf.SpecialVocab(tmp_path / "out", load_merges=True)
    assert vocabulary.chat_template == CHATML and vocabulary.special_token_ids["eos"] == saved["eos_token_id"]
    assert (tmp_path / "out" / "tokenizer.json").is_file()
