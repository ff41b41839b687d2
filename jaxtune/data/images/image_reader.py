"""Images to patches, by the model's own image processor of transformers, which needs pillow and numpy only."""

import importlib
import json
import math
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32

from jaxtune.config.schema import VisionOptions
from jaxtune.data.images.image_files import decode_image, describe_place, find_place, read_size
from jaxtune.errors import UserError, is_failure
from jaxtune.image_layout import ImageLayout, ImageRef, order_blocks
from jaxtune.json_file import read_json

Size = tuple[int, int]
"""Height and width in pixels."""

FILES = ("preprocessor_config.json", "processor_config.json")
"""Files of a model's folder that describe its image processor."""


@dataclass(frozen=True)
class ImageReader:
    """Finds images and their sizes, and reads their patches. A pickled copy does the same in another process.

    Attributes:
        folder: the model's folder, which describes its image processor.
        family: the model_type of its config.json.
        layout: the layout of patches.
        max_pixels: vision.max_pixels.
        min_pixels: vision.min_pixels.
        norm_bbox: vision.norm_bbox, in which boxes are written into messages.
    """

    folder: Path
    family: str
    layout: ImageLayout
    max_pixels: int | None = None
    min_pixels: int | None = None
    norm_bbox: Literal["norm1000", "none"] | None = None

    @property
    def identity(self) -> str:
        """A text that changes with everything that changes the tokens of an image, or its boxes."""
        options = self.family, self.max_pixels, self.min_pixels, self.norm_bbox
        settings = [self._processor.to_dict(), vars(self.layout), options]
        return json.dumps(settings, default=str, sort_keys=True)

    def find(self, image: Any, folder: str) -> tuple[ImageRef, Size, Size]:
        """Return the image that a sample names, and its sizes before and after preprocessing.

        Arguments and errors as in `find_place` and `read_size`; UserError too if the processor refuses the size.
        """
        place, content = find_place(image, folder)
        size = read_size(place, content)
        resized = self._resize(place, size)
        return ImageRef(place, self._grid(resized)), size, resized

    def read_patches(self, ref: ImageRef) -> Float32[np.ndarray, "patches values"]:
        """Return the patches of an image, in the order of its layout.

        Raises:
            UserError: the image cannot be read, or has another size than when `find` returned it.
        """
        image = decode_image(ref.place)
        if self._grid(self._resize(ref.place, (image.height, image.width))) != ref.grid:
            raise UserError(
                f"image {describe_place(ref.place)}: its size is {image.width}x{image.height} pixels now, and was "
                "another when the documents were prepared; change the dataset's file, or delete data.cache_dir"
            )
        if self._kind == "edge" and (scale := self._scale(image.height, image.width)) != 1:
            image = image.resize((int(image.width * scale), int(image.height * scale)))
        pixels = np.asarray(self._processor.preprocess(image, return_tensors="np", **self._arguments)["pixel_values"])
        rows, columns = ref.grid
        merge, patch, channels = self.layout.merge, self.layout.patch, self.layout.channels
        if self._kind == "pixels":  # (patches, channels * frames * patch * patch), in blocks row by row
            frames = pixels.reshape(rows * columns, channels, -1, patch * patch)
            blocks = frames[:, :, 0].reshape(-1, merge**2, self.layout.patch_values)  # all frames are the same
        else:
            if self._kind == "patches":  # (1, most patches, patch * patch * channels), row by row
                grid = pixels[0, : rows * columns].reshape(rows, columns, patch, patch, channels)
                pixels = grid.transpose(4, 0, 2, 1, 3)
            split = pixels.reshape(channels, rows // merge, merge, patch, columns // merge, merge, patch)
            blocks = split.transpose(1, 4, 2, 5, 0, 3, 6).reshape(-1, merge**2, self.layout.patch_values)
        ordered = blocks[order_blocks(ref.grid, self.layout)[0]]
        return ordered.reshape(-1, self.layout.patch_values).astype(np.float32, copy=False)

    def check(self) -> None:
        """Raise UserError if the image processor cannot be loaded or used, or vision.*_pixels have no effect."""
        processor = self._processor
        bounds = {"max_pixels": self.max_pixels, "min_pixels": self.min_pixels}
        limits = [f"vision.{name}" for name, bound in bounds.items() if bound]
        if limits and self._kind in ("fixed", "patches"):
            remedy = f"; change max_soft_tokens in {self._file}" if self._kind == "patches" else ""
            raise UserError(
                f"{limits[0]} has no effect: this model's image processor sets the size of all images{remedy}"
            )
        if self.max_pixels and self.min_pixels and self.max_pixels < self.min_pixels:
            raise UserError(f"vision.min_pixels={self.min_pixels} is more than vision.max_pixels={self.max_pixels}")
        least, most = self._bounds if self._kind == "pixels" else (0, 0)
        if least > most:
            of_processor = f"of the image processor in {self.folder}"
            least_name = "vision.min_pixels" if self.min_pixels else f"size.shortest_edge {of_processor}"
            most_name = "vision.max_pixels" if self.max_pixels else f"size.longest_edge {of_processor}"
            raise UserError(f"the least pixels, {least_name}={least}, are more than the most, {most_name}={most}")
        if not processor.do_resize:
            raise UserError(f"{self.folder}: its image processor does not resize images (do_resize), which is needed")
        if self.layout.side is not None and self._kind == "fixed":
            size, wanted = self._resize("", (1, 1)), self.layout.side * self.layout.patch
            if size != (wanted, wanted):
                raise UserError(
                    f"{self.folder}: its image processor makes images of {size[1]}x{size[0]} pixels, and the vision "
                    f"tower sees images of {wanted}x{wanted}; size in {self._file} must be the image_size of "
                    "config.json"
                )
        if self._kind == "patches":
            self._check_patches()

    def _check_patches(self) -> None:
        """Raise UserError unless a processor that limits patches makes those that the tower sees."""
        processor, layout = self._processor, self.layout
        size = processor.patch_size, processor.pooling_kernel_size
        if size != (layout.patch, layout.merge):
            raise UserError(
                f"{self.folder}: its image processor has patch_size={size[0]}, pooling_kernel_size={size[1]}, and the "
                f"vision_config of config.json has {layout.patch} and {layout.merge}; change {self._file}"
            )
        most = processor.max_soft_tokens * layout.merge  # patches of the side of an image that is one block high
        if layout.longest is not None and most > layout.longest:
            raise UserError(
                f"{self.folder}: max_soft_tokens={processor.max_soft_tokens} allows images that are {most:,} patches "
                f"long, and the vision tower has embeddings of {layout.longest:,} positions; make it smaller in "
                f"{self._file}"
            )

    def write_limits(self, output: Path) -> None:
        """Write the limits of pixels that images were read with into the files of the image processor in a folder.

        Only a processor that limits pixels has a setting for them.
        """
        if self._kind != "pixels":
            return
        least, most = self._bounds
        for path in (output / name for name in FILES if (output / name).is_file()):
            described = read_json(path)
            if path.name == FILES[1] and "image_processor" not in described:
                continue
            settings = described.get("image_processor", described)  # processor_config.json describes several
            settings["size"] = {"shortest_edge": least, "longest_edge": most}
            # Older files have these two, which take the place of `size`.
            settings |= {name: one for name, one in (("min_pixels", least), ("max_pixels", most)) if name in settings}
            path.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")

    @property
    def _file(self) -> str:
        """The name of the file that transformers reads the settings of the image processor from."""
        several = self.folder / FILES[1]
        return FILES[1] if several.is_file() and "image_processor" in read_json(several) else FILES[0]

    @property
    def _processor(self) -> Any:
        return load_processor(self.folder)

    @property
    def _kind(self) -> str:
        """Return the limit of an image's size: its pixels, its longest edge, its patches; or fixed."""
        return _KINDS[_class_name(self._processor)]

    @property
    def _arguments(self) -> dict[str, Any]:
        """Return the arguments with which the family's processor of transformers calls its image processor."""
        arguments: dict[str, Any] = {"do_convert_rgb": True}
        if self._kind == "pixels":
            shortest, longest = self._bounds
            arguments["size"] = {"shortest_edge": shortest, "longest_edge": longest}
        elif self._kind == "edge":
            arguments["patch_size"] = {"height": self._block, "width": self._block}
        elif _class_name(self._processor) == "Gemma3ImageProcessor":
            arguments["do_pan_and_scan"] = False
        return arguments

    @property
    def _block(self) -> int:
        """Pixels of the side of a block of patches."""
        return self.layout.patch * self.layout.merge

    @property
    def _bounds(self) -> tuple[int, int]:
        """The least and the most pixels, of a processor that limits them."""
        size = self._processor.size
        return self.min_pixels or size["shortest_edge"], self.max_pixels or size["longest_edge"]

    def _scale(self, height: int, width: int) -> float:
        """Return the factor of an image's sides, for a processor that limits the longest edge only."""
        pixels = height * width
        if self.max_pixels and pixels > self.max_pixels:
            return math.sqrt(self.max_pixels / pixels)
        return math.sqrt(self.min_pixels / pixels) if self.min_pixels and pixels < self.min_pixels else 1

    def _resize(self, place: str, size: Size) -> Size:
        """Return an image's size after preprocessing."""
        processor, (height, width) = self._processor, size
        of_module = vars(importlib.import_module(type(processor).__module__))
        try:
            match self._kind:
                case "fixed":
                    return processor.size["height"], processor.size["width"]
                case "pixels":
                    return of_module["smart_resize"](height, width, self._block, *self._bounds)
                case "patches":
                    pooling = processor.pooling_kernel_size
                    most = processor.max_soft_tokens * pooling**2
                    return of_module["get_aspect_ratio_preserving_size"](
                        height, width, processor.patch_size, most, pooling
                    )
                case _:
                    scale = self._scale(height, width)
                    shape = (3, height, width) if scale == 1 else (3, int(height * scale), int(width * scale))
                    # The function reads the shape of the image only.
                    image = np.broadcast_to(np.uint8(0), shape)
                    edge, block = processor.size["longest_edge"], self._block
                    return of_module["get_resize_output_image_size"](image, edge, block, "channels_first")
        except (ValueError, ZeroDivisionError) as error:
            raise UserError(f"image {describe_place(place)}: {width}x{height} pixels: {error}") from error

    def _grid(self, resized: Size) -> tuple[int, int]:
        rows, columns = (side // self.layout.patch for side in resized)
        return rows, columns


@dataclass(frozen=True)
class KeepingReader(ImageReader):
    """Reads each image once, and keeps its patches as long as it lives: for images that many completions share."""

    kept: dict[ImageRef, Float32[np.ndarray, "patches values"]] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, reader: ImageReader) -> "KeepingReader":
        """Return a reader that reads as another one does, and has kept nothing yet."""
        return cls(**vars(reader))

    def read_patches(self, ref: ImageRef) -> Float32[np.ndarray, "patches values"]:
        """Return the patches of an image, as `ImageReader.read_patches`."""
        if ref not in self.kept:
            self.kept[ref] = super().read_patches(ref)
        return self.kept[ref]


def open_reader(options: VisionOptions, folder: Path, family: str, layout: ImageLayout | None) -> ImageReader | None:
    """Return the reader of a model's images; None if vision.patches_per_row is not set.

    Args:
        options: the section vision.
        folder: the model's folder, as for its tokenizer.
        family: the model_type of its config.json.
        layout: the layout of images that its vision tower sees; None: it has no tower.

    Raises:
        UserError: the model has no tower, or as `ImageReader.check`.
    """
    if options.patches_per_row is None:
        return None
    if layout is None:
        raise UserError(f"vision.patches_per_row: the model, of family {family}, has no vision tower")
    reader = ImageReader(folder, family, layout, options.max_pixels, options.min_pixels, options.norm_bbox)
    reader.check()
    return reader


# Classes of transformers, without "Pil", and what determines the size of an image.
_KINDS = {
    "Qwen2VLImageProcessor": "pixels",
    "Ernie4_5_VLMoeImageProcessor": "pixels",
    "Ernie4_5_VL_MoeImageProcessor": "pixels",
    "PixtralImageProcessor": "edge",
    "Gemma4ImageProcessor": "patches",
    "Gemma3ImageProcessor": "fixed",
    "SiglipImageProcessor": "fixed",
}


def _class_name(processor: Any) -> str:
    return type(processor).__name__.removesuffix("Pil")


@lru_cache
def load_processor(folder: Path) -> Any:
    """Return the image processor of a model's folder, the one that works on numpy arrays.

    Raises:
        UserError: the folder has none, it cannot be loaded, or it is of a class that is not supported.
    """
    from transformers import AutoImageProcessor  # seconds to import

    if not any((folder / name).is_file() for name in FILES):
        raise UserError(
            f"{folder} has no {' or '.join(FILES)}, which describes the sizes of images (vision.patches_per_row): copy "
            "it there from a model with the same tower"
        )
    try:
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
    except BaseException as error:
        if not is_failure(error):
            raise
        raise UserError(f"the image processor in {folder} cannot be loaded: {error}") from error
    if _class_name(processor) not in _KINDS:
        raise UserError(
            f"{folder}: the image processor {_class_name(processor)} is not supported; {', '.join(_KINDS)} are"
        )
    return processor
