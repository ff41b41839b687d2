"""Images in a row: patches, the embeddings of image tokens, rotary positions, and the keys that image tokens see."""

from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from tiny import numbered_documents

from jaxtune.columns import NEXT_TOKEN, image_columns
from jaxtune.config.schema import DataOptions
from jaxtune.data.formats.units import Documents
from jaxtune.data.rows.loader import abstract_batch, batches
from jaxtune.data.rows.packed_rows import Rows
from jaxtune.errors import UserError
from jaxtune.image_layout import ImageLayout, ImageRef
from jaxtune.parallel.layout import P, by_token
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions

SEQ_LEN, PATCHES, TOKEN = 32, 96, 7
PLAIN = ImageLayout(patch=2, merge=2, token=TOKEN, channels=1)
FULL = replace(PLAIN, window=2, rope_axes=True, bidirectional=True)


class Reader:
    """Makes patches that begin with the number of the image and of the block, counted row by row."""

    def __init__(self, layout):
        self.layout = layout

    def read_patches(self, ref):
        merge, (rows, columns) = self.layout.merge, ref.grid
        document, number = map(int, ref.place.split("/"))
        pixels = np.zeros((rows, columns, self.layout.patch_values), np.float32)
        pixels[..., 0] = 100 * document + number
        pixels[..., 1] = np.add.outer(np.arange(rows) // merge * (columns // merge), np.arange(columns) // merge)
        # The number, row by row, of each patch in the order of the layout: windows, blocks and patches in turn.
        window = merge * (self.layout.window or max(ref.grid))
        sides = [(side // window, side % window // merge, side % merge) for side in np.indices(ref.grid)]
        keys = [key.ravel() for pair in zip(*sides) for key in pair]
        return pixels.reshape(-1, self.layout.patch_values)[np.lexsort(keys[::-1])]


class BrokenReader(Reader):
    """Can read no image."""

    def read_patches(self, ref):
        raise UserError(f"image {ref.place}: cannot be decoded")


@dataclass(frozen=True)
class Pictured(Documents):
    """Documents with images."""

    pictures: tuple[tuple[ImageRef, ...], ...] = ()

    def images(self, i):
        return self.pictures[i]

    @property
    def image_counts(self):
        return np.array([len(images) for images in self.pictures])

    @property
    def patches(self):
        return np.array([sum(image.patches for image in images) for images in self.pictures])


def pictured(documents, layout=FULL, continuous=False):
    """Return documents from lists of tokens and grids: a grid is an image of this many rows and columns of blocks."""
    tokens, pictures = [], []
    for number, parts in enumerate(documents):
        of_document, images = [], []
        for part in parts:
            if isinstance(part, tuple):
                of_document += [TOKEN] * (part[0] * part[1])
                place = f"{number}/{len(images)}"
                images.append(ImageRef(place, (part[0] * layout.merge, part[1] * layout.merge)))
            else:
                of_document.append(part)
        tokens.append(of_document)
        pictures.append(tuple(images))
    plain = numbered_documents([len(each) for each in tokens], continuous=continuous)
    [part] = plain.parts
    values = {**part.values, "tokens": np.concatenate(tokens).astype(np.int32)}
    return Pictured((replace(part, values=values),), plain.chosen, cast(Any, Reader(layout)), tuple(pictures))


def open_rows(documents, patches=PATCHES, **options):
    columns = (*NEXT_TOKEN, *image_columns(documents.layout, patches))
    return Rows(documents, DataOptions(seq_len=SEQ_LEN, shuffle=False, **options), 1, columns)


DOCUMENT = st.lists(
    st.one_of(st.integers(10, 20), st.tuples(st.integers(1, 3), st.integers(1, 3))), min_size=2, max_size=6
).filter(lambda parts: sum(part[0] * part[1] if isinstance(part, tuple) else 1 for part in parts) > 1)


@given(documents=st.lists(DOCUMENT, min_size=1, max_size=6), layout=st.sampled_from([PLAIN, FULL]))
@settings(deadline=None)
def test_each_image_token_gets_the_block_that_it_stands_for(documents, layout):
    """The k-th image token of a document gets the k-th block of its images, row by row; patches see their own image."""
    documents = pictured(documents, layout)
    try:
        rows = open_rows(documents)
    except UserError:
        return  # no document fits
    block, trained = layout.merge**2, 0
    for index in range(rows.stop):
        row, used = rows[index], 0
        segment = np.cumsum(row["positions"] == 0) * (row["segment_ids"] > 0)
        for number, document in enumerate(rows.documents_in(index), start=1):
            places = row["image_place"][segment == number]
            tokens = documents.values("tokens", document, 0, SEQ_LEN)
            assert np.array_equal(places >= 0, (tokens == TOKEN) & bool(documents.images(document)))
            embeddings = row["patches"].reshape(PATCHES // block, block, -1)[places[places >= 0]]
            expected = [
                (100 * document + image, k)
                for image, ref in enumerate(documents.images(document))
                for k in range(ref.patches // block)
            ]
            assert [tuple(pixels[0, :2]) for pixels in embeddings] == expected
            assert (embeddings[:, :, :2] == embeddings[:, :1, :2]).all()
            used += sum(ref.patches for ref in documents.images(document))
            trained += 1
        whose, blocks = row["patches"][:, 0], row["patches"][:, 1]
        for patch in range(used):
            image = np.flatnonzero((whose == whose[patch]) & (np.arange(PATCHES) < used))
            assert (row["patch_start"][patch], row["patch_end"][patch]) == (image[0], image[-1] + 1)
            (y, x), (height, width) = row["patch_positions"][patch], row["patch_grid"][patch]
            assert height * width == len(image)
            assert y // layout.merge * (width // layout.merge) + x // layout.merge == blocks[patch]
            if layout.window:
                windows = row["patch_positions"][image] // (layout.merge * layout.window)
                seen = image[(windows == windows[patch - image[0]]).all(axis=1)]
                assert np.arange(row["window_start"][patch], row["window_end"][patch]).tolist() == seen.tolist()
        for name in ("patches", "patch_start", "patch_end", "patch_positions"):
            assert not row[name][used:].any()
        assert (row["patch_grid"][used:] == 1).all()
    assert trained == rows.counts.documents


def test_rotary_positions_and_visible_keys_of_images():
    """Text, an image of 2 x 3 blocks, text; then a document without images, and one that begins with an image."""
    rows = open_rows(pictured([[11, 12, (2, 3), 13, 14], [15, 16, 17], [(1, 2), 18, (2, 1), 19]]))
    [row] = [rows[i] for i in range(rows.stop)]
    assert row["rope_positions"].T.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 0, 1, 2, 0, 0, 2, 3, 3, 5, *[0] * 13],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 0, 1, 2, 0, 0, 2, 3, 4, 5, *[0] * 13],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 0, 1, 2, 0, 1, 2, 3, 3, 5, *[0] * 13],
    ]
    ends = [1, 2, 8, 8, 8, 8, 8, 8, 9, 10, 11, 12, 13, 15, 15, 16, 18, 18, 19]
    assert row["key_end"].tolist() == [*ends, *[0] * 13]
    assert row["image_place"].tolist() == [-1, -1, 0, 1, 4, 2, 3, 5, *[-1] * 5, 6, 7, -1, 8, 9, *[-1] * 14]
    assert row["key_start"].tolist() == [*[0] * 10, *[10] * 3, *[13] * 6, *[SEQ_LEN] * 13]


def test_rows_without_images_have_the_columns_too():
    """In a run with images: documents that no image belongs to, though they name its token, split over rows."""
    documents = pictured([[TOKEN, *range(10, 59)]], continuous=True)
    data = DataOptions(seq_len=SEQ_LEN, shuffle=False, truncation="split")
    for reader in (documents.reader, None):
        rows = Rows(replace(documents, reader=reader), data, 1, (*NEXT_TOKEN, *image_columns(FULL, PATCHES)))
        for row in (rows[0], rows[1]):
            assert not row["patches"].any() and not row["patch_end"].any() and (row["image_place"] == -1).all()
            assert (row["rope_positions"] == row["positions"][:, None]).all()
            own = np.where(row["segment_ids"] > 0, np.arange(SEQ_LEN) + 1, 0)
            assert np.array_equal(row["key_end"], own)
        assert rows.counts.images == rows.counts.patches == 0 and "image" not in str(rows.counts)


def test_lost_documents_with_images_are_counted_and_said():
    """Two documents have too many patches, one too many tokens, and a text is cut."""
    documents = pictured([[(3, 3), 10], [(3, 3), (1, 1), 11], [12, (2, 2)], [*range(10, 43), (1, 1)], [*range(50)]])
    rows = open_rows(documents, patches=32, truncation="right")
    counts = rows.counts
    assert (counts.documents, counts.dropped_documents, counts.dropped_for_patches) == (2, 3, 2)
    assert counts.dropped_tokens == 10 + 11 + 34 and counts.truncated_documents == 1
    assert (counts.images, counts.patches, counts.patch_fill) == (1, 16, 16 / (32 * rows.stop))
    assert "25.0% full of 16 patches of 1 image" in str(counts) and "3 dropped (2 for their patches)" in str(counts)
    dropped, cut = rows.losses
    assert dropped.startswith("3 of 5 documents are left out") and "vision.patches_per_row=32 patches (2 of" in dropped
    assert dropped.endswith("raise data.seq_len or vision.patches_per_row, or lower vision.max_pixels")
    assert cut.endswith("raise data.seq_len")
    with pytest.raises(UserError, match="up to 36 patches; raise vision.patches_per_row"):
        open_rows(pictured([[(3, 3), 10]]), patches=32)


def test_a_broken_image_stops_the_run_with_the_place_of_its_document():
    documents = pictured([[10, 11], [12, (1, 1)]])
    [part] = documents.parts
    documents = replace(documents, parts=(replace(part, places=("a.jsonl line 1", "a.jsonl line 2")),))
    with pytest.raises(UserError, match="^a.jsonl line 2: image 1/0: cannot be decoded"):
        open_rows(replace(documents, reader=BrokenReader(FULL)))[0]
    fewer = replace(documents, pictures=((), (ImageRef("1/0", (2, 4)),)))
    with pytest.raises(UserError, match="line 2: 1 image token, but the images become 2 embeddings"):
        open_rows(fewer)[0]


@pytest.mark.parametrize("mesh", [MeshOptions(fsdp=1), MeshOptions(fsdp=2, sequence=2)], ids=["one", "four"])
def test_batches_shard_the_rows_of_patches(mesh):
    """A program compiled for the abstract batch takes the batch; only rows are sharded, and the last is padding."""
    rows = open_rows(pictured([[12, (2, 2), 13], [(1, 3), *range(10, 40)], [14, 15], [16, (2, 2), *range(30, 50)]]))
    sharding = NamedSharding(make_mesh(mesh, jax.devices()[: mesh.fsdp * mesh.sequence]), P(None, *by_token()))
    columns = (*NEXT_TOKEN, *image_columns(FULL, PATCHES))
    read = list(batches(rows, (1, 2, SEQ_LEN), sharding, 0, rows.stop))
    abstract = abstract_batch((1, 2, SEQ_LEN), sharding, columns)
    assert abstract["patches"].shape == (1, 2, PATCHES, FULL.patch_values)
    assert abstract["patch_grid"].shape == (1, 2, PATCHES, 2) and abstract["key_end"].shape == (1, 2, SEQ_LEN)
    for row, batch in read:
        assert batch.keys() == abstract.keys()
        for name, leaf in abstract.items():
            assert (batch[name].shape, batch[name].dtype) == (leaf.shape, leaf.dtype)
            assert batch[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
            for j in range(2) if name != "row" else ():
                assert np.array_equal(np.asarray(batch[name])[0, j], rows[row - 2 + j][name])
