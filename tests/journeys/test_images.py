"""A model that sees: trained on pictures with known answers, resumed, evaluated, exported, loaded in transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
from image_processors import PROCESSORS
from journey import check_resumed_run
from PIL import Image
from runs import call, metrics, recipe_command
from tiny import byte_tokenizer

from jaxtune.data.images.image_reader import load_processor

WORDS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (40, 40, 220), "white": (240, 240, 240)}
OPTIONS = {
    "vision.patches_per_row": 1024,
    "data.seq_len": 512,
    "model.dtype": "float32",
    "precision.recipe": "fp32",
    "train.micro_batch_size": 2,
    "train.grad_accum_steps": 1,
}


def draw(rng: np.random.Generator, file: Path) -> dict:
    """Save a picture of one to three bars of a colour on one side, and return a sample that asks about it."""
    colour, count, side = rng.choice(list(COLOURS)), int(rng.integers(1, 4)), int(rng.integers(2))
    pixels = np.full((32, 32, 3), 20, np.uint8)
    for row in 8 * rng.choice(4, count, replace=False):
        left = rng.integers(8) + 16 * side
        pixels[row + 1 : row + 7, left : left + 8] = COLOURS[colour]
    Image.fromarray(pixels).save(file)
    questions = {"Which colour?": colour, "How many?": str(count), "Which side?": ("left", "right")[side]}
    question = rng.choice(list(questions))
    content = [{"type": "image", "path": file.name}, {"type": "text", "text": str(question)}]
    answer = str(questions[question])
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def write_samples(home: Path, count: int) -> None:
    """Write chat.jsonl and its pictures; every fiftieth sample has none."""
    rng = np.random.default_rng(0)
    samples = [draw(rng, home / f"{number}.png") for number in range(count)]
    plain = {"messages": [{"role": "user", "content": "Say no."}, {"role": "assistant", "content": "no"}]}
    samples[::50] = [plain] * len(samples[::50])
    (home / "chat.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with a tiny Qwen3-VL and forty samples."""
    pytest.importorskip("torch", reason="making the model needs torch (Python 3.11 here)")
    home = tmp_path_factory.mktemp("home")
    folder = home / "model"
    tokenizer = byte_tokenizer(folder, TEMPLATE, ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *WORDS))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS["qwen3_vl"][0]))
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]},
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    names = ("image_token_id", "vision_start_token_id", "vision_end_token_id")
    numbers = dict(zip(names, map(tokenizer.convert_tokens_to_ids, WORDS), strict=True))
    save_qwen3_vl(folder, text_config=text, vision_config=vision, tie_word_embeddings=True, **numbers)
    write_samples(home, 40)
    return home


def save_qwen3_vl(folder: Path, **entries) -> None:
    """Save a Qwen3-VL of random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.Qwen3VLForConditionalGeneration(transformers.Qwen3VLConfig(**entries))
    model.save_pretrained(folder)


def loss_in_transformers(folder: Path, data: Path) -> tuple[float, float]:
    """Return the mean loss of the answers' tokens, and the share that is the likeliest, one sample after the other."""
    import torch
    import transformers

    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer, processor = transformers.AutoTokenizer.from_pretrained(folder), load_processor(folder)
    image_token, losses, right = tokenizer.convert_tokens_to_ids(WORDS[0]), [], []
    for line in data.read_text().splitlines():
        messages = json.loads(line)["messages"]
        inputs, text = {}, tokenizer.apply_chat_template(messages, tokenize=False)
        prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        if isinstance(messages[0]["content"], list):
            file = data.parent / messages[0]["content"][0]["path"]
            inputs = dict(processor(Image.open(file), return_tensors="pt"))
            tokens = WORDS[0] * int(inputs["image_grid_thw"].prod() // 4)
            text, prompt = (each.replace(WORDS[0], tokens) for each in (text, prompt))
        ids, start = torch.tensor([tokenizer(text).input_ids]), len(tokenizer(prompt).input_ids)
        stop = start + len(tokenizer(messages[-1]["content"] + "<|im_end|>").input_ids)
        with torch.no_grad():
            types = (ids == image_token).int()
            logits = model(input_ids=ids, mm_token_type_ids=types, **inputs).logits[0, start - 1 : stop - 1]
        losses += torch.nn.functional.cross_entropy(logits, ids[0, start:stop], reduction="none").tolist()
        right += (logits.argmax(-1) == ids[0, start:stop]).tolist()
    return float(np.mean(losses)), float(np.mean(right))


def test_adapters_of_a_model_that_sees_are_resumed_exported_and_loaded(home):
    """The merged model has in transformers, sample by sample, the loss of our evaluation of packed rows."""
    samples = home / "chat.jsonl"
    options = {**OPTIONS, "data.validation_split": 0.0, "data.eval_datasets": samples}
    folder, _ = check_resumed_run(home, "qwen_lora.py", "lora", **options)
    merged = home / "merged"
    call("jaxtune.export", f"--run={folder}", f"--output={merged}", "--merge")
    ours = [row["eval_loss"] for row in metrics(folder) if "eval_loss" in row][-1]
    assert abs(loss_in_transformers(merged, samples)[0] - ours) <= 1e-5 * ours


@pytest.mark.nightly
def test_a_model_learns_to_answer_questions_about_pictures(home):
    """Trained from random weights, tower included; then adapters on the result, which still sees in transformers."""
    write_samples(home, 1500)
    options = {**OPTIONS, "data.validation_split": 0.05, "train.micro_batch_size": 4, "memory.remat": "none"}
    more = {"vision.train": "tower", "train.max_steps": 800, "ckpt.save_steps": 800, "optim.learning_rate": 3e-3}
    call(*recipe_command(home, "qwen_full.py", "scratch", **options, **more))
    assert accuracy(home / "runs" / "scratch") > 0.95
    trained = home / "trained"
    trained.mkdir()
    (trained / "model").symlink_to(home / "runs" / "scratch" / "export")
    samples = [draw(np.random.default_rng(number), trained / f"{number}.png") for number in range(40)]
    (trained / "chat.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    options |= {"data.validation_split": 0.0, "data.eval_datasets": trained / "chat.jsonl"}
    call(*recipe_command(trained, "qwen_lora.py", "lora", **options, **{"optim.learning_rate": 1e-4}))
    ours, merged = accuracy(trained / "runs" / "lora"), trained / "merged"
    call("jaxtune.export", f"--run={trained / 'runs' / 'lora'}", f"--output={merged}", "--merge")
    assert ours > 0.95 and loss_in_transformers(merged, trained / "chat.jsonl")[1] == pytest.approx(ours, abs=1e-6)


def accuracy(folder: Path) -> float:
    """Return the share of the answers' tokens that the last evaluation of a run found the likeliest."""
    return [row["eval_token_accuracy"] for row in metrics(folder) if "eval_token_accuracy" in row][-1]


@pytest.mark.nightly
def test_transformers_answers_about_pictures_as_jaxtune_generate_does(home):
    """The greedy answers of a merged export are equal, to every picture and to a question without one."""
    samples, merged, output = home / "chat.jsonl", home / "answering", home / "answers.jsonl"
    # Few steps: the answers are no words yet, but differ between pictures.
    call(*recipe_command(home, "qwen_lora.py", "answering", **OPTIONS))
    run = home / "runs" / "answering"
    call("jaxtune.export", f"--run={run}", f"--output={merged}", "--merge")
    how = ("--temperature=0", "--max_new_tokens=12", f"--input={samples}")
    call("jaxtune.generate", f"--model={merged}", f"--output={output}", *how)
    ours = [json.loads(line)["completion"] for line in output.read_text().splitlines()]
    expected = answers_in_transformers(merged, samples)
    assert ours == expected and len(set(ours)) > 1
    call("jaxtune.generate", f"--model={run}", f"--output={output}", *how)
    assert [json.loads(line)["completion"] for line in output.read_text().splitlines()] == expected
    text = json.loads(samples.read_text().splitlines()[1])["messages"][0]["content"][1]["text"]
    shown = call("jaxtune.generate", f"--model={merged}", f"--image={home / '1.png'}", f"--prompt={text}", *how[:2])
    assert shown == expected[1] + "\n"


def answers_in_transformers(folder: Path, data: Path) -> list[str]:
    """Return the greedy answer to the first message of each sample, one sample after the other."""
    import torch
    import transformers

    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer, processor = transformers.AutoTokenizer.from_pretrained(folder), load_processor(folder)
    image_token, answers = tokenizer.convert_tokens_to_ids(WORDS[0]), []
    for line in data.read_text().splitlines():
        messages = json.loads(line)["messages"][:-1]
        inputs, prompt = {}, tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if isinstance(messages[0]["content"], list):
            file = data.parent / messages[0]["content"][0]["path"]
            inputs = dict(processor(Image.open(file), return_tensors="pt"))
            prompt = prompt.replace(WORDS[0], WORDS[0] * int(inputs["image_grid_thw"].prod() // 4))
        ids = torch.tensor([tokenizer(prompt).input_ids])
        how = {"mm_token_type_ids": (ids == image_token).int(), "eos_token_id": tokenizer.eos_token_id}
        made = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False, **how, **inputs)  # pyright: ignore
        answers.append(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))
    return answers
