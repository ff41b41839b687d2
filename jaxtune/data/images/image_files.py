"""Find the images that samples name, read their sizes from their headers, and decode them."""

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from jaxtune.data.images.table_cells import open_remote, parse_cell, read_cell
from jaxtune.errors import UserError, hide_secrets

if TYPE_CHECKING:
    from PIL.Image import Image

# Formats of one picture that pillow decodes by itself. EPS, for example, would run another program.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
MAX_PIXELS = 2**27
"""Pixels of the largest image that is decoded, which takes 3 bytes a pixel: a small file may hold many more."""


def find_place(image: Any, folder: str) -> tuple[str, bytes | None]:
    """Return how an image is found again, and its bytes if the sample holds them.

    Args:
        image: a path or URL, {"url"} as OpenAI writes it, or {"bytes", "path"} as `datasets` does.
        folder: the folder, or URL of a folder, of relative paths.

    Raises:
        UserError: it is something else, or is only in the sample, where it could not be found again.
    """
    if isinstance(image, dict):
        if isinstance(content := image.get("bytes"), bytes):
            if "place" not in image:
                raise UserError(
                    "an image is in the sample, and is not read from there again while training: write the images to "
                    "files, or the samples to a Parquet file"
                )
            return image["place"], content
        image = image.get("path") or image.get("url")
    if not isinstance(image, str) or not image:
        raise UserError(f"an image is a path, a URL or {{bytes, path}}, found {repr(image)[:80]}")
    if image.startswith("data:"):
        raise UserError(
            "an image is written into the text (data:...), and is not read from there again while training: write the "
            "images to files, or to a Parquet file as {bytes, path}"
        )
    image = image.removeprefix("file://")
    if "://" in image:
        if hide_secrets(image) != image:
            raise UserError(
                f"the URL of an image, {hide_secrets(image)}, has a secret, which the cache would hold; download it"
            )
        return image, None
    if "://" in folder:
        return f"{folder}/{image}", None
    return os.path.abspath(Path(folder, Path(image).expanduser())), None


def describe_place(place: str) -> str:
    """Return a place as the user is shown it."""
    cell = parse_cell(place)
    return place if cell is None else str(cell)


def read_size(place: str, content: bytes | None = None) -> tuple[int, int]:
    """Return height and width of an image as it is seen, from its header; `content`: its bytes, if they are known.

    Raises:
        UserError: the image is missing, broken, in another format, or too large.
    """
    with _open(place, content) as image:
        # The orientation as far as the header tells; ImageOps would decode a PNG to look behind its pixels.
        from PIL import Image

        orientation = Image.Image.getexif(image).get(0x0112)
        width, height = image.size
        return (width, height) if orientation in (5, 6, 7, 8) else (height, width)


def decode_image(place: str) -> "Image":
    """Return an image in RGB, turned as its EXIF data says, as transformers' `load_image` does.

    Raises:
        UserError: as `read_size`.
    """
    with _open(place) as image:
        from PIL import ImageOps

        return ImageOps.exif_transpose(image).convert("RGB")


@contextlib.contextmanager
def _open(place: str, content: bytes | None = None) -> Iterator["Image"]:
    """Open an image without decoding it. Errors while it is open become UserErrors that name the place."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError("images need pillow: pip install 'jaxtune[images]'") from error

    name = describe_place(place)
    try:
        with _open_bytes(place, content) as stream, Image.open(stream, formats=_FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise UserError(
                    f"image {name}: {image.width}x{image.height} pixels, the most are {MAX_PIXELS:,} in all"
                )
            yield image
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"image {name}: no such file") from error
    except Exception as error:  # pillow and file systems raise many types for damaged files
        raise UserError(f"image {name}: cannot be read: {error or type(error).__name__}") from error


def _open_bytes(place: str, content: bytes | None) -> BinaryIO:
    if content is not None:
        return io.BytesIO(content)
    if (cell := parse_cell(place)) is not None:
        return io.BytesIO(read_cell(cell))
    if "://" in place:
        return open_remote(place)
    return Path(place).open("rb")
