"""Batches of conversations with images, from files on: tokens and pixels equal transformers' processors'."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from image_processors import image_reader, picture
from PIL import Image
from tiny import byte_tokenizer
from transformers import Gemma3Processor, Gemma4Processor, Qwen3VLProcessor

from jaxtune.columns import NEXT_TOKEN, image_columns
from jaxtune.config.schema import Config, DataOptions, Dataset, TrainOptions, VisionOptions
from jaxtune.data import open_feed
from jaxtune.data.images.image_reader import load_processor
from jaxtune.errors import UserError
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}IMAGE{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)
SIZES = {"wide.png": (24, 40), "tall.png": (50, 16), "small.png": (16, 17)}
CONTENTS = [
    ["What is ", "wide.png", "?"],
    ["tall.png", "wide.png", "small.png"],
    ["No image"],
    ["small.png"],
    ["Compare ", "small.png", " and ", "tall.png"],
]


class _WithoutVideos:
    """The video processor needs torchvision; no test has videos, or sound."""

    def check_argument_for_proper_class(self, *args):
        return None


class _Qwen3VL(_WithoutVideos, Qwen3VLProcessor):
    pass


class _Gemma4(_WithoutVideos, Gemma4Processor):
    pass


def qwen3_vl(images, tokenizer):
    return _Qwen3VL(images, tokenizer, SimpleNamespace())


def named(tokenizer, begin, end, image):
    """Return the tokenizer with Gemma's names for the tokens of images."""
    for name, token in {"boi_token": begin, "eoi_token": end, "image_token": image}.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    return tokenizer


def gemma3(images, tokenizer):
    tokenizer = named(tokenizer, "<start_of_image>", "<end_of_image>", "<image_soft_token>")
    return Gemma3Processor(images, tokenizer, image_seq_length=4)


def gemma4(images, tokenizer):
    tokenizer = named(tokenizer, "<|image>", "<image|>", "<|image|>")
    tokenizer.pad_token = tokenizer.boa_token = tokenizer.eoa_token = "<|endoftext|>"  # not written: one text, no sound
    return _Gemma4(SimpleNamespace(), images, tokenizer, SimpleNamespace())


# The text of an image in the chat template, special tokens, and the Processor.
FAMILIES = {
    "qwen3_vl": (
        "<|vision_start|><|image_pad|><|vision_end|>",
        ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
        qwen3_vl,
    ),
    "gemma3": ("<start_of_image>", ("<image_soft_token>", "<start_of_image>", "<end_of_image>"), gemma3),
    "gemma4": ("<|image|>", ("<|image|>", "<|image>", "<image|>", "<|video|>"), gemma4),
}


def part(content):
    return {"type": "image", "path": content} if content in SIZES else {"type": "text", "text": content}


def opened(tmp_path, family, patches=256, **data):
    """Return the feed of the conversations, their messages, and the Processor of a family."""
    for name, (height, width) in SIZES.items():
        Image.fromarray(picture(height, width, len(name))).save(tmp_path / name)
    conversations = [
        [{"role": "user", "content": [*map(part, contents)]}, {"role": "assistant", "content": f"answer {number}"}]
        for number, contents in enumerate(CONTENTS)
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    written, special, make = FAMILIES[family]
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *special)
    tokenizer = byte_tokenizer(tmp_path / "model", TEMPLATE.replace("IMAGE", written), special)
    reader = image_reader(family, tmp_path / "model", tokenizer.convert_tokens_to_ids(special[3]))
    config = Config(
        data=DataOptions(datasets=(Dataset(path=str(path)),), seq_len=320, cache_dir=str(tmp_path / "cache"), **data),
        train=TrainOptions(micro_batch_size=2, epochs=2),
        vision=VisionOptions(patches_per_row=patches),
    )
    columns = (*NEXT_TOKEN, *image_columns(reader.layout, patches))
    feed = open_feed(
        config, tokenizer, len(tokenizer), make_mesh(MeshOptions(), jax.devices()[:1]), columns, images=reader
    )
    return feed, conversations, make(load_processor(tmp_path / "model"), tokenizer)


def canvas(row, place, layout):
    """Return the pixels of the image that has the patch `place`, (channels, height, width), and its grid."""
    start, end = row["patch_start"][place], row["patch_end"][place]
    (rows, columns), size = row["patch_grid"][start], layout.patch
    pixels = np.full((3, rows * size, columns * size), np.nan, np.float32)
    for patch, (y, x) in zip(row["patches"][start:end], row["patch_positions"][start:end]):
        pixels[:, y * size : (y + 1) * size, x * size : (x + 1) * size] = patch.reshape(3, size, size)
    return pixels, (rows, columns)


def their_pixels(outputs, number, grid, layout):
    """Return the pixels of an image as transformers gives them to the model, (channels, height, width)."""
    shape = (3, grid[0] * layout.patch, grid[1] * layout.patch)
    if "image_position_ids" in outputs:  # (column, row) of each patch, whose pixels have their channels side by side
        pixels, count = np.full(shape, np.nan, np.float32), np.prod(grid)
        places, patches = (outputs[name][number] for name in ("image_position_ids", "pixel_values"))
        assert (places[count:] == -1).all()
        for (x, y), patch in zip(places[:count] * layout.patch, patches):
            by_pixel = patch.reshape(layout.patch, layout.patch, 3)
            pixels[:, y : y + layout.patch, x : x + layout.patch] = by_pixel.transpose(2, 0, 1)
        return pixels
    if "image_grid_thw" not in outputs:
        return outputs["pixel_values"][number]
    counts = np.prod(outputs["image_grid_thw"], axis=1)
    assert outputs["image_grid_thw"][number].tolist() == [1, *grid]
    patches = outputs["pixel_values"][counts[:number].sum() : counts[: number + 1].sum()]
    rows, columns = (side // layout.merge for side in grid)
    blocks = patches.reshape(rows, columns, layout.merge, layout.merge, 3, 2, layout.patch, layout.patch)[..., 0, :, :]
    return blocks.transpose(4, 0, 2, 5, 1, 3, 6).reshape(shape)


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_hold_what_the_processor_gives_to_the_model(family, tmp_path):
    feed, conversations, processor = opened(tmp_path, family, 2304 if family == "gemma4" else 256)
    layout, trained = feed.documents.layout, 0
    for _, batch in feed.batches({}):
        columns = {name: np.asarray(array) for name, array in batch.items()}
        for i, j in np.ndindex(*columns["row"].shape):
            row, number = {name: column[i, j] for name, column in columns.items()}, int(columns["row"][i, j])
            for segment, document in enumerate(feed.rows.documents_in(number), start=1):
                messages, paths = conversations[document], [c for c in CONTENTS[document] if c in SIZES]
                images = [Image.open(tmp_path / path).convert("RGB") for path in paths]
                text = processor.tokenizer.apply_chat_template(messages, tokenize=False)
                outputs = processor(images=images or None, text=text, return_tensors="np")
                of_document = row["segment_ids"] == segment
                assert row["tokens"][of_document].tolist() == outputs["input_ids"][0].tolist()
                places = row["image_place"][of_document]
                assert np.array_equal(places >= 0, row["tokens"][of_document] == layout.token)
                seen = places[places >= 0]
                for image in range(len(images)):
                    # The first token of an image finds it; here images come without windows, in one piece.
                    pixels, grid = canvas(row, seen[0] * layout.merge**2, layout)
                    assert np.array_equal(pixels, their_pixels(outputs, image, grid, layout))
                    seen = seen[np.prod(grid) // layout.merge**2 :]
                assert not len(seen)
                trained += 1
    assert trained == 2 * len(CONTENTS)
    assert feed.counts.images == 7 and feed.counts.patch_fill > 0.3


def test_a_run_that_resumes_reads_the_same_images(tmp_path):
    feed, *_ = opened(tmp_path, "qwen3_vl", validation_split=1)
    assert feed.eval_rows[""].counts.documents == 1 and feed.counts.documents == 4
    whole = list(feed.batches({}))
    again, *_ = opened(tmp_path, "qwen3_vl", validation_split=1)
    rest = list(again.batches(json.loads(json.dumps(whole[0][0]))))
    assert len(rest) == len(whole) - 1 > 0
    for (position, batch), (expected_position, expected) in zip(rest, whole[1:]):
        assert position == expected_position and batch.keys() == expected.keys()
        assert all(np.array_equal(batch[name], expected[name]) for name in expected)


def test_images_that_do_not_fit_are_dropped_and_broken_ones_stop_the_run(tmp_path, caplog):
    with caplog.at_level("INFO", "jaxtune"):
        feed, *_ = opened(tmp_path, "qwen3_vl", patches=80)
    assert feed.counts.dropped_for_patches == 1 and "1 dropped (1 for their patches)" in caplog.text
    assert "have more than vision.patches_per_row=80 patches (1 of them)" in caplog.text
    (tmp_path / "wide.png").write_bytes(b"not an image")
    with pytest.raises(UserError, match=r"data.jsonl:1: image .*wide.png"):
        list(feed.batches({}))
