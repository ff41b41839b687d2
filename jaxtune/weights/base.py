"""The base model of a run: what its folder, or a config.json without weights, describes."""

import dataclasses
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtune import hf
from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.host import plugins
from jaxtune.models import families
from jaxtune.models.places import Tensor
from jaxtune.models.structure.model_spec import ModelSpec, classifier
from jaxtune.weights.architecture import spec_of
from jaxtune.weights.mtp_files import check_modules


@dataclass(frozen=True)
class Base:
    """The base model of a run as its folder describes it, without adapters and with nothing frozen.

    Attributes:
        spec: The model, with embeddings for the tokens of data.special_tokens.
        folders: Folders of the weights, config.json and the tokenizer; None for a model without files.
        described: config.json with the recipe's changes.
        scheme: How the files quantize the weights; None: they are not quantized, and quant.format quantizes them while
            they are read.
        saved_vocabulary: Number of tokens with embeddings in the files; the spec may have more. 0 without files.
        new_head: Whether the model needs a head that the files lack: a classifier that starts from a language model.
    """

    spec: ModelSpec
    folders: hf.Folders | None = None
    described: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scheme: hf.Scheme | None = None
    saved_vocabulary: int = 0
    new_head: bool = False


def read_base(config: Config) -> Base:
    """Read a config's base model from its folder or the hub, without its weights. Raises UserError."""
    plugins.load(config)  # first, because a plugin may define the model's family
    folders = hf.find_folders(config.model)
    folder, saved = folders.weights, hf.read_config(folders.config)
    described = hf.apply_options(saved, config.model)
    if config.mtp.weight and config.vision.patches_per_row is not None:
        raise UserError(
            "mtp.weight with vision.patches_per_row: modules would predict from embeddings of image tokens that the "
            "vision tower has not replaced; leave one of the two out"
        )
    spec, new_head = _with_head(spec_of(described, saved, config), described, config)
    if config.model.from_scratch and spec.untouched is not None and spec.vision is None:
        raise UserError(
            f"model.from_scratch: only the text decoder of {spec.family} is trained, so its other parts would stay "
            "random; give a folder whose config.json is the text_config of this one"
        )
    if config.model.from_scratch and spec.vision is not None and described.get("audio_config") is not None:
        raise UserError(
            f"model.from_scratch: sound is not trained in {spec.family}, so its audio tower would stay random; give a "
            "folder whose config.json has audio_config null"
        )
    if spec.tied and not config.model.from_scratch and _has_own_head(spec, folder):  # reads both tensors
        spec = dataclasses.replace(spec, tied=False)
    if spec.has_experts and not config.model.from_scratch and _has_stacked_experts(spec, folder):
        spec = dataclasses.replace(spec, stacked_experts=True)
    if spec.has_experts and not config.model.from_scratch and _has_swapped_experts(spec, folder):
        spec = dataclasses.replace(spec, swapped_experts=True)
    saved_vocabulary = spec.vocabulary  # before data.special_tokens adds rows
    if config.data.special_tokens:
        spec = _with_special_tokens(spec, folders.tokenizer, config)
    scheme = None if config.model.from_scratch else hf.read_scheme(folder, described)
    if spec.mtp and not config.model.from_scratch:
        check_modules(spec, folder, scheme)
    return Base(spec, folders, described, scheme, saved_vocabulary, new_head)


def check_same_config(saved: Mapping[str, Any] | None, config: Config, folders: hf.Folders) -> None:
    """Raise UserError if config.json has changed since a checkpoint, and describes another model now.

    saved: the content at that time; None, of an older version of jaxtune: not compared.
    """
    now = hf.read_config(folders.config)
    if saved is None or saved == now:
        return
    then_spec, now_spec = (spec_of(hf.apply_options(one, config.model), one, config) for one in (saved, now))
    if then_spec != now_spec:
        names = [name for name in sorted(saved.keys() | now.keys()) if saved.get(name) != now.get(name)]
        lines = [f"  {name}: {reprlib.repr(saved.get(name))} then, {reprlib.repr(now.get(name))} now" for name in names]
        raise UserError(
            f"{folders.config / 'config.json'} has changed since the checkpoint, and describes another model now:\n"
            + "\n".join(lines)
            + "\nput the file back, or start a new run"
        )


def _with_head(spec: ModelSpec, described: dict[str, Any], config: Config) -> tuple[ModelSpec, bool]:
    """Return the spec with the head that model.head names, and whether config.json lacks this head.

    Raises UserError if a classifier would be used as a language model, if transformers has no classifier of this
    family, or if the number of labels is missing or does not fit config.json.
    """
    model, saved = config.model, hf.label_names(described)
    if model.head == "lm":
        if saved is not None and not model.from_scratch:
            raise UserError(
                f"{model.path} is a classifier, {described['architectures'][0]}, with a head of {len(saved)} labels in "
                "place of the vocabulary: train and evaluate it with model.head='classification'; it cannot generate "
                "text"
            )
        return spec, False
    if spec.family not in families.classifiers():
        raise UserError(
            f"model.head='classification': transformers has no sequence classifier of only the decoder for "
            f"model_type={spec.family!r}, so it could not load the export; it has one for "
            f"{', '.join(families.classifiers())}"
        )
    if model.num_labels is None:
        raise UserError("model.num_labels: the number of labels is not known, as no data is read here; set it")
    task = "regression" if model.num_labels == 1 else "single_label_classification"  # as transformers infers it
    if saved is not None and described.get("problem_type") not in (None, task):
        raise UserError(
            f"config.json: problem_type={described['problem_type']!r} is not supported with {model.num_labels} labels; "
            f"it must be {task!r}, which is cross-entropy, or the squared error of one label"
        )
    return classifier(spec, model.num_labels), saved is None


def _has_own_head(spec: ModelSpec, folder: Path) -> bool:
    """Whether the files hold a head that differs from the embedding although config.json ties the two.

    transformers does not tie them in this case either. Mistral Small 3.1 is an example: its config.json leaves the
    class's default.
    """
    if not any(folder.glob("*.safetensors")):  # `plan` needs no weights
        return False
    sources, names = hf.open_weights(folder), families.FAMILIES[spec.family].NAMES
    head, embedding = (sources.get(names[name]) for name in ("head.weight", "embed.weight"))
    return head is not None and embedding is not None and not head.equals(embedding)


def _has_stacked_experts(spec: ModelSpec, folder: Path) -> bool:
    """Whether the files hold a layer's experts in one tensor although the family's table has a tensor for each.

    transformers loads both. Qwen3.5 with experts is published with stacks, and saved by transformers without.
    """
    stacked = families.stacked_experts_of(spec)
    if not stacked or not any(folder.glob("*.safetensors")):
        return False
    names = {name.format(layer=number) for number in spec.mixtures for name in stacked}
    sources = hf.open_weights(folder)
    return not names.isdisjoint(sources)


def _has_swapped_experts(spec: ModelSpec, folder: Path) -> bool:
    """Whether the files hold the matrices of stacked experts in the layout that the family's table does not have."""
    if not families.may_swap_experts(spec) or not any(folder.glob("*.safetensors")):
        return False
    number, experts = next(iter(spec.mixtures.items()))
    # A square matrix has the same shape in both layouts; gate and up are one tensor of twice the rows.
    name, matrix = ("down", (spec.hidden, experts.size))
    if spec.hidden == experts.size:
        name, matrix = ("gate", (2 * experts.size, spec.hidden))
    tensor = families.names_of(spec)[f"mlp.experts.{name}.weight"]
    assert isinstance(tensor, Tensor), "experts that have two layouts are stacked"
    source = hf.open_weights(folder).get(tensor.name.format(layer=number))
    swapped = matrix if tensor.transposed else matrix[::-1]
    return source is not None and source.shape[1:] == swapped


def _with_special_tokens(spec: ModelSpec, folder: Path, config: Config) -> ModelSpec:
    """Return the spec with embeddings for data.special_tokens, if the padded rows of the embedding do not suffice."""
    tokens = len(hf.load_tokenizer(folder, None, config.data.special_tokens))
    if tokens > spec.vocabulary and config.lora.enabled:
        raise UserError(
            f"data.special_tokens makes {tokens} tokens of the model's {spec.vocabulary}, but adapters train no "
            "embeddings: peft could not load them on this base. Train the whole model (lora.enabled=False), or leave "
            "the tokens out and take a chat.template of tokens that the model has"
        )
    return dataclasses.replace(spec, vocabulary=max(spec.vocabulary, tokens))
