"""Images: their sizes from headers, and their patches, equal to transformers' image processors'."""

import dataclasses
import json
import pickle

import numpy as np
import pytest
from image_processors import PROCESSORS, image_reader, picture
from PIL import Image

from jaxtune.config.schema import Dataset
from jaxtune.config.sources import in_memory
from jaxtune.data.formats.image_messages import has_images
from jaxtune.data.images import image_files
from jaxtune.data.images.image_files import decode_image, read_size
from jaxtune.data.images.image_reader import ImageReader, KeepingReader, load_processor
from jaxtune.data.images.table_cells import place_images
from jaxtune.data.reading import sources
from jaxtune.errors import UserError
from jaxtune.image_layout import ImageLayout, order_blocks

SIZES = ((40, 40), (9, 61), (61, 9), (33, 50), (150, 201), (8, 8))


def save(path, height=33, width=50, mode="RGB", **options):
    Image.fromarray(picture(height, width)).convert(mode).save(path, **options)
    return str(path)


def patches_of(image, patch, merge, order):
    """Return the patches of a picture, (channels, height, width), in blocks of merge x merge in an order of blocks."""
    columns = image.shape[2] // patch // merge
    patches = []
    for block in order:
        for inside in range(merge * merge):
            row = block // columns * merge + inside // merge
            column = block % columns * merge + inside % merge
            part = image[:, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
            patches.append(part.ravel())
    return np.stack(patches)


@pytest.mark.parametrize("family", PROCESSORS)
def test_patches_are_those_of_transformers_in_the_order_of_the_layout(family, tmp_path):
    reader = image_reader(family, tmp_path / "model")
    layout, processor = reader.layout, load_processor(tmp_path / "model")
    reader = pickle.loads(pickle.dumps(reader))  # worker processes get a copy
    options = {"patch_size": {"height": 8, "width": 8}} if family == "mistral3" else {}
    for number, (height, width) in enumerate(SIZES):
        path = save(tmp_path / f"{number}.png", height, width)
        ref, size, resized = reader.find(path, "")
        assert size == (height, width) and ref.place == path
        assert resized == tuple(side * layout.patch for side in ref.grid)
        assert not any(side % layout.merge for side in ref.grid)
        patches = reader.read_patches(ref)
        assert patches.dtype == np.float32 and patches.shape == (ref.patches, layout.patch_values)
        outputs = processor.preprocess(Image.open(path), return_tensors="np", **options)
        pixels, order = outputs["pixel_values"], order_blocks(ref.grid, layout)[0]
        if "image_grid_thw" in outputs:
            assert outputs["image_grid_thw"].tolist() == [[1, *ref.grid]]
            first_frame = pixels.reshape(len(pixels), 3, -1, layout.patch**2)[:, :, 0].reshape(-1, layout.merge**2, 48)
            wanted = first_frame[order].reshape(-1, 48)
        elif "image_position_ids" in outputs:
            x, y = outputs["image_position_ids"][0][: ref.patches].T
            assert (y.max() + 1, x.max() + 1) == ref.grid
            image = np.zeros((3, *resized), np.float32)
            for patch, row, column in zip(pixels[0], y * layout.patch, x * layout.patch):
                part = patch.reshape(layout.patch, layout.patch, 3).transpose(2, 0, 1)
                image[:, row : row + layout.patch, column : column + layout.patch] = part
            wanted = patches_of(image, layout.patch, layout.merge, order)
        else:
            assert pixels.shape[2:] == resized
            wanted = patches_of(pixels[0], layout.patch, layout.merge, order)
        np.testing.assert_array_equal(patches, wanted)


def test_windows_are_those_of_qwen2_5_vl():
    pytest.importorskip("torch")
    import torch
    from transformers.vision_utils import get_vision_window_index

    for grid in ((6, 6), (8, 14), (2, 20), (26, 10)):
        index, _ = get_vision_window_index(torch.tensor([[1, *grid]]), 2, window_size=24, patch_size=4)
        assert order_blocks(grid, ImageLayout(4, 2, 0, window=3))[0].tolist() == index.tolist()


@pytest.mark.parametrize("family", ["qwen3_vl", "ernie4_5_vl_moe"])
def test_limits_of_pixels_are_those_of_the_processor(family, tmp_path):
    reader = image_reader(family, tmp_path / "model", max_pixels=30 * 30, min_pixels=20 * 20)
    processor = load_processor(tmp_path / "model")
    for height, width in SIZES:
        path = save(tmp_path / "a.png", height, width)
        ref, _, _ = reader.find(path, "")
        bounds = {"shortest_edge": 20 * 20, "longest_edge": 30 * 30}
        wanted = processor.preprocess(Image.open(path), return_tensors="np", size=bounds)
        assert [1, *ref.grid] == wanted["image_grid_thw"][0].tolist()
        first_frame = wanted["pixel_values"].reshape(-1, 3, 2 if family == "qwen3_vl" else 1, 16)[:, :, 0]
        np.testing.assert_array_equal(reader.read_patches(ref), first_frame.reshape(-1, 48))
    assert image_reader(family, tmp_path / "model").identity != reader.identity


@pytest.mark.parametrize("nested", [False, True])
def test_an_export_gets_the_limits_that_images_were_read_with(nested, tmp_path):
    """Files of all ages give transformers the same sizes as training had; others are left as they are."""
    options = {"max_pixels": 32 * 32}
    reader, written = image_reader("qwen2_5_vl", tmp_path / "model", **options), tmp_path / "export"
    written.mkdir()
    settings = PROCESSORS["qwen2_5_vl"][0] | {"min_pixels": 64, "max_pixels": 48 * 48}  # as Qwen2.5-VL's
    path = written / ("processor_config.json" if nested else "preprocessor_config.json")
    path.write_text(json.dumps({"image_processor": settings, "processor_class": "x"} if nested else settings))
    reader.write_limits(written)
    exported = ImageReader(written, "qwen2_5_vl", reader.layout)
    save(tmp_path / "a.png", 80, 60)
    assert exported.find("a.png", str(tmp_path)) == reader.find("a.png", str(tmp_path))
    assert (
        settings.keys() == (json.loads(path.read_text()).get("image_processor") or json.loads(path.read_text())).keys()
    )
    if not nested:
        of_texts = written / "processor_config.json"
        of_texts.write_text('{"processor_class": "x"}')
        reader.write_limits(written)
        assert of_texts.read_text() == '{"processor_class": "x"}'
    other = image_reader("mistral3", tmp_path / "mistral", **options)
    before = (tmp_path / "mistral" / "preprocessor_config.json").read_text()
    other.write_limits(tmp_path / "mistral")
    assert (tmp_path / "mistral" / "preprocessor_config.json").read_text() == before


def test_pixtral_scales_to_the_limits_before_its_longest_edge(tmp_path):
    path = save(tmp_path / "a.png", 36, 24)
    assert image_reader("mistral3", tmp_path / "m").find(path, "")[2] == (40, 24)  # to whole blocks of 8 x 8
    for limit, wanted in (({"max_pixels": 18 * 12}, (24, 16)), ({"min_pixels": 72 * 48}, (40, 32))):
        reader = image_reader("mistral3", tmp_path / "m", **limit)
        ref, _, resized = reader.find(path, "")
        assert resized == wanted and reader.read_patches(ref).shape == (ref.patches, 48)


@pytest.mark.parametrize(
    "limits, message",
    [({"max_pixels": 100}, "vision.max_pixels has no effect"), ({"max_pixels": 1, "min_pixels": 2}, "has no effect")],
)
def test_a_limit_without_effect_is_refused(limits, message, tmp_path):
    with pytest.raises(UserError, match=message):
        image_reader("gemma3", tmp_path, **limits).check()
    image_reader("gemma3", tmp_path).check()
    with pytest.raises(UserError, match="min_pixels=20 is more than vision.max_pixels=10"):
        image_reader("qwen3_vl", tmp_path / "qwen", max_pixels=10, min_pixels=20).check()
    of_processor = "size.{} of the image processor in .*qwen"
    with pytest.raises(UserError, match=of_processor.format("shortest_edge") + "=256, .* vision.max_pixels=200"):
        image_reader("qwen3_vl", tmp_path / "qwen", max_pixels=200).check()
    with pytest.raises(UserError, match="vision.min_pixels=5000, .*" + of_processor.format("longest_edge") + "=4096"):
        image_reader("qwen3_vl", tmp_path / "qwen", min_pixels=5000).check()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"patch": 4}, "patch_size=2, pooling_kernel_size=3, and the vision_config of config.json has 4 and 3"),
        ({"merge": 2}, "patch_size=2, pooling_kernel_size=3, and the vision_config of config.json has 2 and 2"),
        ({"longest": 209}, "max_soft_tokens=70 .* 210 patches long, and .* embeddings of 209 positions"),
    ],
)
def test_patches_are_those_that_gemma_4_s_tower_sees(change, message, tmp_path):
    reader = image_reader("gemma4", tmp_path)
    with pytest.raises(UserError, match=message):
        dataclasses.replace(reader, layout=dataclasses.replace(reader.layout, **change)).check()
    dataclasses.replace(reader, layout=dataclasses.replace(reader.layout, longest=210)).check()
    with pytest.raises(UserError, match="max_pixels has no effect: .*; change max_soft_tokens in preprocessor_config"):
        dataclasses.replace(reader, max_pixels=100).check()


def test_images_have_the_size_that_the_tower_sees(tmp_path):
    reader = image_reader("gemma3", tmp_path)
    dataclasses.replace(reader, layout=dataclasses.replace(reader.layout, side=8)).check()
    with pytest.raises(UserError, match=r"images of 32x32 pixels, and the vision tower sees images of 28x28; size in"):
        dataclasses.replace(reader, layout=dataclasses.replace(reader.layout, side=7)).check()


def with_exif(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


VARIANTS = {
    "palette.png": {"mode": "P"},
    "transparent.png": {"mode": "RGBA"},
    "grey.png": {"mode": "L"},
    "bits.png": {"mode": "1"},
    "cmyk.jpg": {"mode": "CMYK"},
    "animation.gif": {"mode": "P"},
    "photo.webp": {},
    **{f"turned{way}.jpg": {"exif": with_exif(way)} for way in (1, 3, 6, 8)},
    "turned.png": {"exif": with_exif(6)},
    **{f"turned{way}.tiff": {"exif": with_exif(way)} for way in (1, 3, 6)},
    "turned.webp": {"exif": with_exif(6)},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_pixels_are_those_that_transformers_loads(name, tmp_path):
    from transformers.image_utils import load_image

    path = save(tmp_path / name, **VARIANTS[name])
    wanted = load_image(path)
    np.testing.assert_array_equal(np.asarray(decode_image(path)), np.asarray(wanted))
    assert read_size(path) == (wanted.height, wanted.width)


def test_exif_data_behind_the_pixels_turn_a_png_too(tmp_path):
    from transformers.image_utils import load_image

    path = tmp_path / "late.png"
    save(path, exif=with_exif(6))
    content = path.read_bytes()
    start, end = content.index(b"eXIf") - 4, content.index(b"IEND") - 4
    length = 12 + int.from_bytes(content[start : start + 4], "big")
    chunk = content[start : start + length]
    path.write_bytes(content[:start] + content[start + length : end] + chunk + content[end:])
    wanted = load_image(str(path))
    assert read_size(str(path)) == (wanted.height, wanted.width) == (50, 33)
    np.testing.assert_array_equal(np.asarray(decode_image(str(path))), np.asarray(wanted))


def test_a_size_is_read_without_decoding(tmp_path, monkeypatch):
    path = tmp_path / "half.png"
    save(path, 200, 300)
    path.write_bytes(path.read_bytes()[:2000])
    assert read_size(str(path)) == (200, 300)
    with pytest.raises(UserError, match=r"half\.png: cannot be read: .*truncated"):
        decode_image(str(path))


def test_bad_images_are_errors_that_name_them(tmp_path, monkeypatch):
    reader = image_reader("qwen3_vl", tmp_path / "model")
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "drawing.eps").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n")
    thin = save(tmp_path / "thin.png", 2, 600)
    cases = {
        "missing.png": r"missing\.png: no such file",
        "text.png": r"text\.png: cannot be read: cannot identify",
        "drawing.eps": r"drawing\.eps: cannot be read",
        thin: r"thin\.png: 600x2 pixels: absolute aspect ratio",
        "data:image/png;base64,aaaa": "written into the text",
        "https://user:secret@host/a.png": "has a query or a password, which may be a secret",
        "https://host/a.png?token=x": "has a query or a password",
        "ftp://host/a.png": "its protocol must be one of http, https,",
        "simplecache::https://host/a.png": "its protocol must be one of",
        "https://host/a.zip::memory://b": "its protocol must be one of",
    }
    for image, message in cases.items():
        with pytest.raises(UserError, match=message):
            reader.find(image, str(tmp_path))
    for image, message in (
        (3, "found 3"),
        ({}, "found None"),
        ({"bytes": b"x"}, "top-level column of a local or public Parquet file"),
    ):
        with pytest.raises(UserError, match=message):
            reader.find(image, str(tmp_path))
    monkeypatch.setattr(image_files, "MAX_PIXELS", 1000)
    with pytest.raises(UserError, match=r"thin\.png: 600x2 pixels, the most are 1,000"):
        reader.find(thin, "")


def test_a_reader_that_keeps_its_images_reads_each_once(tmp_path):
    """The completions of a prompt share its images."""
    reader = image_reader("qwen3_vl", tmp_path / "model")
    ref, _, _ = reader.find(save(tmp_path / "a.png", 40, 40), "")
    keeping, expected = KeepingReader.of(reader), reader.read_patches(ref)
    np.testing.assert_array_equal(keeping.read_patches(ref), expected)
    (tmp_path / "a.png").unlink()
    np.testing.assert_array_equal(keeping.read_patches(dataclasses.replace(ref)), expected)


def test_an_image_that_has_changed_is_not_read(tmp_path):
    reader = image_reader("qwen3_vl", tmp_path / "model")
    path = save(tmp_path / "a.png", 40, 40)
    ref, _, _ = reader.find("a.png", str(tmp_path))
    save(tmp_path / "a.png", 40, 20)
    with pytest.raises(UserError, match=r"a\.png: its size is 20x40 pixels now, and was another"):
        reader.read_patches(ref)
    assert ref.place == path


def test_a_model_without_an_image_processor_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"has no preprocessor_config\.json"):
        load_processor(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "CLIPImageProcessor"}))
    with pytest.raises(UserError, match="CLIPImageProcessor is not supported"):
        load_processor(tmp_path)


def write_tables(folder):
    """Write the same samples with images as Parquet in three row groups and as Arrow, and return them as a dataset."""
    import datasets

    for i in range(5):
        save(folder / f"{i}.png", 20 + i, 30)
    columns = {"one": datasets.Image(), "several": datasets.List(datasets.Image())}
    images = [{"bytes": (folder / f"{i}.png").read_bytes(), "path": None} for i in range(5)]
    rows = {"one": images, "several": [images[i:] for i in range(5)]}
    dataset = datasets.Dataset.from_dict(rows, features=datasets.Features(columns))
    dataset.to_parquet(folder / "rows.parquet", batch_size=2)
    dataset.save_to_disk(folder / "saved")
    return dataset


def read_samples(path, **options):
    def fail(error):
        raise error

    return [sample for _, sample in sources.open_source(Dataset(path=path, **options)).read(fail)]


@pytest.mark.parametrize("source", ["parquet", "arrow", "renamed", "python"])
def test_images_in_tables_are_found_again(source, tmp_path, monkeypatch):
    dataset = write_tables(tmp_path)
    (tmp_path / "rows.data").write_bytes(next((tmp_path / "saved").glob("*.arrow")).read_bytes())
    paths = {"parquet": "rows.parquet", "arrow": "saved", "renamed": "rows.data", "python": in_memory.add(dataset)}
    monkeypatch.chdir(tmp_path)  # places hold absolute paths
    samples = read_samples(paths[source], **({"ds_type": "arrow"} if source == "renamed" else {}))
    monkeypatch.chdir("/")
    reader = image_reader("qwen3_vl", tmp_path / "model")
    assert len(samples) == 5
    for i, sample in reversed(list(enumerate(samples))):
        for image, number in zip([sample["one"], *sample["several"]], [i, *range(i, 5)], strict=True):
            (tmp_path / f"{number}.png").unlink(missing_ok=True)  # the bytes are in the table
            ref, size, _ = reader.find(image, "")
            assert size == (20 + number, 30) and ".png" not in ref.place
            np.testing.assert_array_equal(np.asarray(decode_image(ref.place)), picture(20 + number, 30))


def test_a_table_that_has_changed_is_an_error(tmp_path):
    write_tables(tmp_path)
    place = read_samples(str(tmp_path / "rows.parquet"))[4]["one"]["place"]
    (cell := json.loads(place))[1] = 7
    with pytest.raises(UserError, match=r"rows\.parquet row 7 column 'one': cannot be read: .*has changed"):
        decode_image(json.dumps(cell))


def test_an_image_in_a_remote_arrow_file_is_refused(tmp_path):
    import fsspec

    write_tables(tmp_path)
    with fsspec.open("memory://tables/rows.arrow", "wb") as file:
        content = next((tmp_path / "saved").glob("*.arrow")).read_bytes()
        file.write(content)  # pyright: ignore[reportAttributeAccessIssue]
    sample = read_samples("memory://tables/rows.arrow")[0]
    with pytest.raises(UserError, match="write the images to files"):
        image_reader("qwen3_vl", tmp_path / "model").find(sample["one"], "")


def test_images_of_a_list_have_places_if_its_first_item_is_none(tmp_path):
    content = {"bytes": b"x", "path": None}
    placed = place_images({"several": [None, content]}, str(tmp_path / "a.parquet"), 3, "parquet")["several"]
    assert placed[0] is None and json.loads(placed[1]["place"])[1:] == [3, "several", 1, "parquet"]


def test_an_image_in_a_stream_is_refused(tmp_path):
    path = in_memory.add(write_tables(tmp_path).to_iterable_dataset())
    samples = read_samples(path)
    with pytest.raises(UserError, match="write the images to files"):
        image_reader("qwen3_vl", tmp_path / "model").find(samples[0]["one"], "")


def test_an_image_at_a_url_is_read_there(tmp_path):
    import fsspec

    path = save(tmp_path / "a.png", 40, 40)
    with fsspec.open("memory://images/a.png", "wb") as file:
        file.write((tmp_path / "a.png").read_bytes())  # pyright: ignore[reportAttributeAccessIssue]
    reader = image_reader("qwen3_vl", tmp_path / "model")
    for name, folder in (("memory://images/a.png", "elsewhere"), ("a.png", "memory://images")):
        ref, _, _ = reader.find(name, folder)
        assert ref.place == "memory://images/a.png"
        np.testing.assert_array_equal(reader.read_patches(ref), reader.read_patches(reader.find(path, "")[0]))
    with pytest.raises(UserError, match="memory://images/b.png"):
        reader.find("b.png", "memory://images")


PART = {"type": "image", "path": "a.png"}


@pytest.mark.parametrize(
    "sample",
    [
        {"prompt": "hi", "images": ["a.png"]},
        {"messages": [{"role": "user", "content": [PART]}]},
        {"messages": json.dumps([{"role": "user", "content": [PART]}])},
        {"conversations": [{"from": "human", "value": [PART]}]},
        {"prompt": {"role": "user", "content": [PART]}},
    ],
)
def test_a_sample_with_images_is_known_in_every_form(sample):
    assert has_images(sample)
    assert not has_images({"prompt": "[image", "images": [], "messages": [{"role": "user", "content": "an image"}]})
