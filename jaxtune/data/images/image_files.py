"""Find the images that samples name, read their sizes from their headers, and decode them."""

import contextlib
import io
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from jaxtune.data.images.table_cells import open_remote, parse_cell, read_cell
from jaxtune.errors import UserError, hide_secrets

if TYPE_CHECKING:
    from PIL.Image import Image

# Formats of one picture that pillow decodes by itself. EPS, for example, would run another program.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_PROTOCOLS = ("http", "https", "s3", "gs", "gcs", "abfs", "az", "hf", "memory")
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
                    "files, or to a top-level column of a local or public Parquet file"
                )
            return image["place"], content
        image = image.get("path") or image.get("url")
    if not isinstance(image, str) or not image:
        raise UserError(f"an image is a path, a URL or {{bytes, path}}, found {repr(image)[:80]}")
    if image.startswith("data:"):
        raise UserError(
            "an image is written into the text (data:...), and is not read from there again while training: write the "
            "images to files, or as {bytes, path} to a top-level column of a local or public Parquet file"
        )
    image = image.removeprefix("file://")
    if "://" in image:
        if "::" in image or image.partition("://")[0] not in _PROTOCOLS:
            raise UserError(
                f"an image is not read from the URL {image}: its protocol must be one of {', '.join(_PROTOCOLS)}, and "
                "only one; download the image"
            )
        if hide_secrets(image) != image:
            raise UserError(
                f"the URL of an image, {hide_secrets(image)}, has a query or a password, which may be a secret, and "
                "the cache would hold it; download the image"
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
        from PIL import Image, PngImagePlugin, TiffImagePlugin

        # Pillow would decode any PNG without EXIF data to look for it behind the pixels.
        in_header = not isinstance(image, PngImagePlugin.PngImageFile) or not _has_late_metadata(image.fp)
        orientation = (Image.Image.getexif(image) if in_header else image.getexif()).get(0x0112)
        width, height = image.size
        if isinstance(image, TiffImagePlugin.TiffImageFile):  # newer versions of pillow have turned `size`
            width, height = (image.tag_v2[tag] for tag in (256, 257))
        return (width, height) if orientation in (5, 6, 7, 8) else (height, width)


def _has_late_metadata(file: Any) -> bool:
    """Return whether a PNG has EXIF data, or text that may hold it, behind its pixels."""
    before, pixels_seen = file.tell(), False
    file.seek(8)  # behind the signature
    try:
        while len(header := file.read(8)) == 8:
            length, kind = struct.unpack(">I4s", header)
            if pixels_seen and kind in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"):
                return True
            pixels_seen = pixels_seen or kind == b"IDAT"
            file.seek(length + 4, os.SEEK_CUR)
    finally:
        file.seek(before)
    return False


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
