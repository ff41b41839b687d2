"""Samples with images in the layouts of several toolkits: their tokens, their documents, and their errors."""

import ast
import importlib.util
import json
import math
import pickle
import string
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from image_processors import image_reader, picture
from PIL import Image
from tiny import byte_tokenizer

from jaxtune.config.schema import Dataset
from jaxtune.data.cache.documents import prepare_shard, tokenize
from jaxtune.data.cache.tokenising import Tokeniser
from jaxtune.data.chat.chat_template import ChatTemplate
from jaxtune.data.formats.image_messages import ImageMessages
from jaxtune.data.formats.prompts import read_prompts
from jaxtune.data.images.image_files import decode_image
from jaxtune.data_options import ChatOptions
from jaxtune.errors import UserError
from jaxtune.image_layout import ImageRef

# As in the published templates of Qwen2.5-VL, Gemma 3, Mistral Small 3.1 and ERNIE 4.5 VL, without their other roles.
PARTS = (
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.textTRIM }}{% endif %}{% endfor %}{% endif %}"
)
TURNS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    + PARTS
    + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The template's image, the image token, and other special tokens by family.
TOKENS = {
    "qwen2_5_vl": ("<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>", "<|vision_start|> <|vision_end|>"),
    "qwen3_vl": ("<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>", "<|vision_start|> <|vision_end|>"),
    "ernie4_5_vl_moe": ("<S><|IMAGE_PLACEHOLDER|><E>", "<|IMAGE_PLACEHOLDER|>", "<S> <E>"),
    "gemma3": ("<start_of_image>", "<image_soft_token>", "<start_of_image> <end_of_image>"),
    "gemma4": ("<|image|>", "<|image|>", "<|image> <image|>"),
    "mistral3": ("[IMG]", "[IMG]", "[IMG_BREAK] [IMG_END]"),
}


def special_tokens(family):
    _, token, others = TOKENS[family]
    return ("<|endoftext|>", "<|im_start|>", "<|im_end|>", token, *others.split())


@pytest.fixture
def read(tmp_path):
    """Return a function that tokenises samples of a family into documents, and the tokenizer."""
    sizes = {"wide.png": (24, 40), "tall.png": (50, 16), "small.png": (16, 16)}
    for name, (height, width) in sizes.items():
        Image.fromarray(picture(height, width, len(name))).save(tmp_path / name)

    def get(*samples, family="qwen3_vl", chat=ChatOptions(), skip=False, pixels=(), **options):
        folder = tmp_path / family
        written, token, _ = TOKENS[family]
        template = TURNS.replace("IMAGE", written).replace("TRIM", " | trim" if family == "gemma3" else "")
        tokenizer = byte_tokenizer(folder, template, special_tokens(family))
        reader = image_reader(family, folder, tokenizer.get_vocab()[token], **dict(pixels))
        path = tmp_path / "data.jsonl"
        text = "".join(json.dumps(sample) + "\n" for sample in samples)
        if not path.exists() or path.read_text() != text:  # the cache compares times too
            path.write_text(text)
        entries = (Dataset(path=str(path), **options),)
        cache = tmp_path / "cache"
        return tokenize(entries, tokenizer, cache, "skip" if skip else "error", chat=chat, images=reader), tokenizer

    return get


def test_prompts_hold_the_images_of_their_messages_and_are_never_cut(tmp_path, caplog):
    """Prompts with too many tokens or patches are left out and counted; a bad image is an error with its line."""
    for name, size in {"small": (16, 16), "large": (32, 32)}.items():
        Image.fromarray(picture(*size, 1)).save(tmp_path / f"{name}.png")
    written, token, _ = TOKENS["qwen3_vl"]
    template = TURNS.replace("IMAGE", written).replace("TRIM", "")
    tokenizer = byte_tokenizer(tmp_path / "model", template, special_tokens("qwen3_vl"))
    reader = image_reader("qwen3_vl", tmp_path / "model", tokenizer.get_vocab()[token])
    names = ["small", "large", "small", "absent"]
    texts = ["", "", string.printable[:62], ""]
    samples = [{"prompt": f"{text}<image>?", "images": [f"{name}.png"]} for text, name in zip(texts, names)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    entry, images = Dataset(path=str(path), max_prompt_tokens=60), ImageMessages(reader, tokenizer)
    how = {"most_tokens": 200, "images": images, "most_patches": 16}
    with caplog.at_level("INFO", logger="jaxtune"):
        (prompt,) = read_prompts((entry,), tokenizer, ChatOptions(), skip=True, **how)
    left_out = "1 with images of more than max_prompt_tokens, 1 of more than vision.patches_per_row=16 patches"
    assert f"1 prompts; 0 too long, {left_out}, 1 bad samples" in caplog.text
    (image,) = prompt.images
    assert prompt.tokens.count(reader.layout.token) == image.patches // reader.layout.merge**2
    with pytest.raises(UserError, match="prompts.jsonl:4: image .*absent.png"):
        read_prompts((entry,), tokenizer, ChatOptions(), skip=False, **how)
    tokenizer.chat_template = "{{ messages[0].content.startswith('x') }}"  # as Qwen3's template, which is of texts
    with pytest.raises(UserError, match="jsonl:1: .* which only a template of a model that sees can write"):
        read_prompts((entry,), tokenizer, ChatOptions(), skip=False, **how)


def text_of(documents, tokenizer, i=0):
    """Return a document's text, with each run of image tokens as its length, and its trained parts between « and »."""
    tokens, weights = documents.read(i, 0, 10**9)
    text = tokenizer.decode(tokens)
    trained = [tokenizer.decode(tokens[weights > 0])]
    token = tokenizer.convert_ids_to_tokens(documents.layout.token)
    runs = text.replace(token, "\0")
    while "\0" in runs:
        count = len(runs) - len(runs[(start := runs.index("\0")) :].lstrip("\0")) - start
        runs = runs[:start] + f"({count})" + runs[start + count :]
    return runs, trained[0]


def talk(*contents):
    return [{"role": "assistant" if i % 2 else "user", "content": content} for i, content in enumerate(contents)]


IMAGE, TEXT = {"type": "image"}, {"type": "text", "text": "What?"}
# Samples that say the same: a wide image and "What?", then a tall one between "Here " and "!"; answers "A" and "B".
LAYOUTS = {
    "hugging face": {
        "messages": talk(
            [{"type": "image", "path": "wide.png"}, TEXT],
            "A",
            [{"type": "text", "text": "Here "}, {"type": "image", "url": "tall.png"}, {"type": "text", "text": "!"}],
            "B",
        )
    },
    "openai": {
        "messages": talk(
            [{"type": "image_url", "image_url": {"url": "wide.png", "detail": "auto"}}, TEXT],
            "A",
            [
                {"type": "input_text", "text": "Here "},
                {"type": "input_image", "image_url": "tall.png"},
                {"type": "input_text", "text": "!"},
            ],
            "B",
        )
    },
    "trl": {
        "images": ["wide.png", "tall.png"],
        "messages": talk(
            [IMAGE, TEXT], "A", [{"type": "text", "text": "Here "}, IMAGE, {"type": "text", "text": "!"}], "B"
        ),
    },
    "llama-factory": {
        "images": ["wide.png", {"path": "tall.png", "bytes": None}],
        "messages": talk("<image>What?", "A", "Here <image>!", "B"),
    },
    "llava": {
        "id": 3,
        "image": ["wide.png", "tall.png"],
        "conversations": [
            {"from": "human", "value": "<image>What?"},
            {"from": "gpt", "value": "A"},
            {"from": "human", "value": "Here <image>!"},
            {"from": "gpt", "value": "B"},
        ],
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_other_toolkits_give_the_same_document(layout, read, tmp_path):
    documents, tokenizer = read(LAYOUTS[layout])
    text, trained = text_of(documents, tokenizer)
    of_wide, of_tall = documents.images(0)
    assert (of_wide.place, of_tall.place) == (str(tmp_path / "wide.png"), str(tmp_path / "tall.png"))
    assert (of_wide.grid, of_tall.grid) == ((6, 10), (12, 4))
    assert documents.patches.tolist() == [60 + 48]
    assert text == (
        "<|im_start|>user\n<|vision_start|>(15)<|vision_end|>What?<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
        "<|im_start|>user\nHere <|vision_start|>(12)<|vision_end|>!<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n"
    )
    assert trained == "A<|im_end|>B<|im_end|>"
    assert "not used" not in "".join(documents.losses) or layout == "llava"


def test_instructions_and_preferences_may_have_images(read):
    alpaca = {"instruction": "<image>What?", "input": "", "output": "A", "images": ["small.png"]}
    documents, tokenizer = read(alpaca)
    assert text_of(documents, tokenizer)[1] == "A<|im_end|>" and documents.images(0)[0].grid == (4, 4)
    pair = {"prompt": "<image>What?", "chosen": "A", "rejected": "B", "images": ["small.png"]}
    documents, tokenizer = read(pair, type="preference")
    assert [text_of(documents, tokenizer, i)[1] for i in (0, 1)] == ["A<|im_end|>", "B<|im_end|>"]
    assert documents.patches.tolist() == [16, 16]
    wanted = {"prompt": [{"role": "user", "content": [IMAGE, TEXT]}], "completion": "A", "label": True}
    other = wanted | {"completion": "B", "images": ["wide.png"]}
    documents, tokenizer = read(wanted | {"images": ["small.png"]}, other, type="unpaired_preference")
    assert documents.patches.tolist() == [16, 16, 60, 60]  # the answer of another sample has this one's prompt


def replace_image_token(module, name):
    """Return the method of a Processor of transformers, also if its module needs packages that are missing here."""
    package = importlib.util.find_spec(f"transformers.models.{module}")
    assert package is not None and package.origin is not None
    file = Path(package.origin).with_name(f"processing_{module}.py")
    (of_class,) = (one for one in ast.parse(file.read_text()).body if getattr(one, "name", "") == name)
    assert isinstance(of_class, ast.ClassDef)
    methods = [one for one in of_class.body if getattr(one, "name", "") == "replace_image_token"]
    scope: dict = {}
    exec(compile(ast.Module(methods, []), str(file), "exec"), scope)
    return scope["replace_image_token"]


@pytest.mark.parametrize("family", TOKENS)
def test_placeholders_expand_as_transformers_processors_do(family, read):
    documents, tokenizer = read(LAYOUTS["trl"], family=family)
    layout, images = documents.layout, documents.images(0)
    _, token, others = TOKENS[family]
    begin, end = others.split()
    module, name = {
        "gemma3": ("gemma3", "Gemma3Processor"),
        "gemma4": ("gemma4", "Gemma4Processor"),
        "mistral3": ("pixtral", "PixtralProcessor"),
        "ernie4_5_vl_moe": ("ernie4_5_vl_moe", "Ernie4_5_VLMoeProcessor"),
    }.get(family, (family, "Qwen3VLProcessor" if family == "qwen3_vl" else "Qwen2_5_VLProcessor"))
    counts = [image.patches // layout.merge**2 for image in images]
    theirs = SimpleNamespace(
        image_processor=SimpleNamespace(merge_size=layout.merge),
        image_token=token,
        image_break_token=begin,
        image_end_token=end,
        boi_token=begin,
        eoi_token=end,
        patch_size=layout.patch,
        spatial_merge_size=layout.merge,
        full_image_sequence=f"\n\n{begin}{token * counts[0]}{end}\n\n",
    )
    inputs = {
        "image_grid_thw": np.array([[1, *image.grid] for image in images]),
        "image_sizes": [[side * layout.patch for side in image.grid] for image in images],
        "num_soft_tokens_per_image": counts,
        "num_crops": [0, 0],
    }
    text = tokenizer.apply_chat_template(LAYOUTS["trl"]["messages"], tokenize=False)
    written = begin if family == "gemma3" else token
    first, second, third = text.split(written)
    expand = replace_image_token(module, name)
    text = first + expand(theirs, inputs, 0) + second + expand(theirs, inputs, 1) + third
    tokens, weights = documents.read(0, 0, 10**9)
    assert tokens.tolist() == tokenizer(text).input_ids
    assert not weights[tokens == layout.token].any() and weights.any()


def test_a_document_of_gemma_is_that_of_its_processor(read):
    """Here the whole Processor can be built without torchvision."""
    pytest.importorskip("torch")
    from transformers import Gemma3Processor

    from jaxtune.data.images.image_reader import load_processor

    documents, tokenizer = read(LAYOUTS["trl"], family="gemma3")
    tokens = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    for name, token in tokens.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    processor = Gemma3Processor(load_processor(documents.reader.folder), tokenizer, image_seq_length=4)
    text = tokenizer.apply_chat_template(LAYOUTS["trl"]["messages"], tokenize=False)
    images = [decode_image(image.place) for image in documents.images(0)]
    outputs = processor(images=images, text=text)
    assert documents.read(0, 0, 10**9)[0].tolist() == list(outputs["input_ids"][0])


def test_an_image_in_a_trained_message_is_context(read):
    sample = {"images": ["small.png", "wide.png"], "messages": talk("Draw.", "Here: <image> and <image>.")}
    for chat in (ChatOptions(), ChatOptions(loss_scale="all"), ChatOptions(roles=("user", "assistant"))):
        documents, tokenizer = read(sample, chat=chat)
        tokens, weights = documents.read(0, 0, 10**9)
        trained = tokenizer.decode(tokens[weights > 0])
        assert "Here:  and .<|im_end|>" in trained and "<|image_pad|>" not in trained


def test_an_image_of_the_user_may_be_in_a_trained_text(read):
    sample = {"images": ["small.png"], "messages": talk("See <image> here", "A")}
    documents, tokenizer = read(sample, chat=ChatOptions(roles=("user", "assistant")))
    assert text_of(documents, tokenizer)[1] == "See  here<|im_end|>A<|im_end|>"


def test_text_only_samples_are_as_without_images(read, tmp_path):
    sample = {"messages": talk("Hi", "A")}
    documents, tokenizer = read(sample, {"images": [], **sample}, {"images": None, **sample}, LAYOUTS["trl"])
    plain = tokenize((Dataset(path=str(tmp_path / "data.jsonl"), samples=1),), tokenizer, tmp_path / "plain")
    for i in range(3):
        for ours, theirs in zip(documents.read(i, 0, 99), plain.read(0, 0, 99)):
            np.testing.assert_array_equal(ours, theirs)
        assert documents.images(i) == () and documents.patches[i] == 0
    assert len(documents.images(3)) == 2 and plain.patches.tolist() == [0] and plain.layout is None


BAD = {
    "0 placeholders for 1 image:": {"images": ["small.png"], "messages": talk("What?", "A")},
    "2 placeholders for 1 image:": {"images": ["small.png"], "messages": talk("<image><image>", "A")},
    "1 placeholder for 0 images:": {"messages": talk([IMAGE], "A")},
    "index 2, and the sample lists 2 images": {
        "images": ["small.png", "wide.png"],
        "messages": talk([IMAGE | {"index": 2}, IMAGE], "A"),
    },
    "it has the key 'images': put each image into": {
        "messages": [{"role": "user", "content": "What?", "images": ["small.png"]}, *talk("", "A")[1:]]
    },
    r"has <\|image_pad\|> 2 times for 1 image": {"image": "small.png", "messages": talk("<image><|image_pad|>", "A")},
    r"has <\|image_pad\|> 1 time for 0 images": {"messages": talk("<|image_pad|>", "A")},
    r"missing\.png: no such file": {"image": "missing.png", "messages": talk("<image>", "A")},
    "part of type 'video'": {"messages": talk([{"type": "video", "path": "a.mp4"}], "A")},
    "both columns": {"image": "small.png", "images": ["small.png"], "messages": talk("<image>", "A")},
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_sample_is_an_error_with_its_line_or_counted(message, read):
    good = LAYOUTS["trl"]
    with pytest.raises(UserError, match=rf"data\.jsonl:2: .*{message}"):
        read(good, BAD[message])
    documents, _ = read(good, BAD[message], good, skip=True)
    assert len(documents) == 2 and documents.skipped_samples == 1 and len(documents.images(1)) == 2


def test_a_part_names_an_image_by_its_index(read, tmp_path):
    parts = [IMAGE | {"index": 1}, TEXT, IMAGE]
    documents, _ = read({"images": ["small.png", "wide.png"], "messages": talk(parts, "A")})
    assert [Path(image.place).name for image in documents.images(0)] == ["wide.png", "small.png"]


def test_a_text_without_images_may_hold_the_placeholder(read):
    documents, tokenizer = read({"messages": talk("Write SVG.", "<svg><image></svg>")})
    assert text_of(documents, tokenizer)[1] == "<svg><image></svg><|im_end|>" and documents.images(0) == ()


def test_the_mark_of_images_in_a_text_is_refused(read, tmp_path):
    _, tokenizer = read({"messages": talk("What?", "A")})
    samples = [
        {"instruction": "\ufdd4", "input": "", "output": "A"},
        {"system": "\ufdd4", "messages": talk("What?", "A")},
        {"messages": talk("\ufdd4", "A")},
    ]
    path = tmp_path / "plain.jsonl"
    for sample in samples:
        path.write_text(json.dumps(sample))
        with pytest.raises(UserError, match="message 0: holds one of the Unicode noncharacters"):
            tokenize((Dataset(path=str(path)),), tokenizer, tmp_path / "plain")
        with pytest.raises(UserError, match="message 0: holds one of the Unicode noncharacters"):
            read(sample)
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "a", "images": ["b.png"]}]}))
    with pytest.raises(UserError, match="it has the key 'images': .*vision.patches_per_row"):
        tokenize((Dataset(path=str(path)),), tokenizer, tmp_path / "plain")
    template = ChatTemplate(tokenizer)
    assert "<|image_pad|>" not in template.text([{"role": "user", "content": "\ufdd4"}])


def test_an_answer_of_a_labelled_sample_may_not_hold_an_image(read):
    sample = {"prompt": "What?", "label": True, "images": ["small.png"]}
    for answer in ("See <image>", [{"role": "assistant", "content": [IMAGE]}]):
        with pytest.raises(UserError, match="an answer holds an image: type unpaired_preference allows"):
            read(sample | {"completion": answer}, type="unpaired_preference")


def test_documents_are_the_same_after_their_files_were_moved(read, tmp_path):
    keys = []
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.png").write_bytes((tmp_path / "wide.png").read_bytes())
        documents, _ = read({"image": f"{folder}/a.png", "messages": talk("<image>", "A")})
        assert documents.images(0)[0].place == str(tmp_path / folder / "a.png")
        keys.append(documents.key)
    documents, _ = read({"image": "tall.png", "messages": talk("<image>", "A")})
    assert keys[0] == keys[1] != documents.key


def test_a_text_may_not_hold_image_tokens(read):
    with pytest.raises(UserError, match=r"data\.jsonl:1: 1 image token, and 0 for its images"):
        read({"text": "an <|image_pad|>"})
    with pytest.raises(UserError, match="column 'images' holds images: only types conversation, .* it has type text"):
        read({"text": "a picture", "images": ["small.png"]})


def test_a_document_with_images_is_never_cut(read):
    long = {"images": ["wide.png"], "messages": talk("<image>" + "x" * 100, "A")}
    short = {"images": ["small.png"], "messages": talk("<image>", "A")}
    documents, _ = read(long, short, max_tokens=90, longer="split")
    assert documents.patches.tolist() == [16] and "1 document of more than 90 tokens left out" in documents.losses[0]
    pair = {"prompt": "<image>" + "x" * 100, "chosen": "A", "rejected": "B", "images": ["small.png"]}
    with pytest.raises(UserError, match="max_prompt_tokens.*, and an image is never cut"):
        read(pair, type="preference", max_prompt_tokens=50)


def test_images_are_read_again_from_the_cache(read, tmp_path):
    samples = [{"image": name, "messages": talk("<image>", "A")} for name in ("wide.png", "tall.png", "small.png")]
    read(*samples)
    documents, _ = read(*samples)
    assert any("from the cache" in note for note in documents.notes)
    assert [documents.images(i)[0].grid for i in range(3)] == [(6, 10), (12, 4), (4, 4)]
    assert documents.images(1) == (ImageRef(str(tmp_path / "tall.png"), (12, 4)),)
    patches = documents.reader.read_patches(documents.images(1)[0])
    assert patches.shape == (48, 48) and patches.dtype == np.float32
    folders = set((tmp_path / "cache").glob("*/summary.json"))
    smaller, _ = read(*samples, pixels={"max_pixels": 24 * 24})
    assert set((tmp_path / "cache").glob("*/summary.json")) > folders
    assert smaller.patches.max() <= 36 and smaller.key != documents.key


def test_other_processes_and_shards_find_the_same_images(read, tmp_path):
    documents, tokenizer = read(LAYOUTS["llava"])
    entries = (Dataset(path=str(tmp_path / "data.jsonl")),)
    prepare_shard(entries, tokenizer, tmp_path / "again", (0, 1), images=documents.reader)
    assert tokenize(entries, tokenizer, tmp_path / "again", images=documents.reader).key == documents.key
    # Worker processes get a pickled copy.
    tokeniser = pickle.loads(pickle.dumps(Tokeniser(entries[0], tokenizer, images=documents.reader)))
    (unit,) = tokeniser([(f"{tmp_path / 'data.jsonl'}:1", LAYOUTS["llava"])]).units
    assert unit.documents[0].images == documents.images(0)


BOXES = {"ref": ["dog", "cat"], "bbox": [[10, 6, 20, 12], [40, 24]]}
ASKED = {
    "image": "wide.png",
    "objects": BOXES,
    "messages": talk("<image>Find <ref-object> and <ref-object>", "<bbox>, <bbox>"),
}


@pytest.mark.parametrize(
    "family, scale, kind, wanted",
    [
        ("qwen3_vl", None, None, "[(250,250),(500,500)], [(1000,1000)]"),
        ("qwen3_vl", "none", None, "[(4,2),(8,4)], [(16,8)]"),
        ("qwen2_5_vl", None, "real", "[(4,2),(8,4)], [(16,8)]"),  # in the family's own scale: resized pixels
        ("qwen2_5_vl", "norm1000", "norm1", "[(10000,6000),(20000,12000)], [(40000,24000)]"),
    ],
)
def test_boxes_are_scaled_as_ms_swift_does(family, scale, kind, wanted, read):
    sample = ASKED | {"objects": BOXES | ({"bbox_type": kind} if kind else {})}
    # With this limit the image of 40 x 24 pixels becomes 16 x 8.
    pixels = {"max_pixels": 16 * 17, "norm_bbox": scale}
    documents, tokenizer = read(sample, family=family, pixels=pixels)
    assert documents.images(0)[0].grid == (2, 4)
    text, trained = text_of(documents, tokenizer)
    assert trained == f"{wanted}<|im_end|>" and "Find dog and cat<" in text


def test_boxes_that_do_not_fit_are_errors(read):
    cases = {
        "1 placeholder <bbox> for 2 in column 'objects'": ASKED | {"messages": talk("<image>", "<bbox>")},
        "image_id 1, and the sample has 1 image": ASKED | {"objects": BOXES | {"image_id": [1]}},
        "bbox_type 'cm' is not": ASKED | {"objects": BOXES | {"bbox_type": "cm"}},
        "found \\[1, 2, 3\\]": ASKED | {"objects": {"bbox": [[1, 2, 3]]}},
        "found \\[nan, 2\\]": ASKED | {"objects": {"bbox": [[math.nan, 2]]}},
        "found \\[1, inf\\]": ASKED | {"objects": {"bbox": [[1, math.inf]]}},
        "found \\[True, 2\\]": ASKED | {"objects": {"bbox": [[True, 2]]}},
        "a ref may not hold <bbox> .*'a <bbox>'": ASKED | {"objects": BOXES | {"ref": ["a <bbox>", "cat"]}},
        "a ref may not hold .* U\\+FDD4": ASKED | {"objects": BOXES | {"ref": ["\ufdd4", "cat"]}},
        "column 'objects' must be": ASKED | {"objects": [1]},
    }
    for message, sample in cases.items():
        with pytest.raises(UserError, match=message):
            read(sample)


def test_prepare_shows_where_an_image_and_its_tokens_are(read, tmp_path):
    from jaxtune.prepare import describe

    documents, tokenizer = read(LAYOUTS["trl"])
    lines = describe(documents, 0, tokenizer, 1000, ids=False).plain.splitlines()
    tokens, _ = documents.read(0, 0, 1000)
    places = np.flatnonzero(tokens == documents.layout.token)
    assert "  context | <|im_start|>user\\n<|vision_start|><|image_pad|>x15<|vision_end|>What?<|im_end|>" in lines[1]
    assert lines[-2:] == [
        f"  image   | {tmp_path / 'wide.png'}: 40x24 pixels after preprocessing, 60 patches, 15 image tokens from "
        f"{places[0]} to {places[14]}",
        f"  image   | {tmp_path / 'tall.png'}: 16x48 pixels after preprocessing, 48 patches, 12 image tokens from "
        f"{places[15]} to {places[26]}",
    ]
