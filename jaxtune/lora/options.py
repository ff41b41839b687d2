"""The options of section `lora`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jaxtune.option_field import Config, Problem, option, problem, value_of

# One line or two an option: this file is a table.
# fmt: off

TITLES = {"ia3": "(IA)^3"}  # what a model card calls the kinds other than low-rank matrices


@dataclass(frozen=True)
class LoraOptions:
    """Low-rank adapters (Hu et al. 2021); all other parameters are frozen, except a classifier's head."""

    enabled: bool = option(False, "train adapters instead of the model", basic=True,
        also="adapter finetuning_type use_peft peft")
    rank: int = option(16, "rank of an adapter", "[1, inf)", when="lora.kind == 'lora'", basic=True,
        also="lora_r r lora_rank")
    alpha: float = option(32.0, "scale: alpha / rank, or alpha / sqrt(rank) with use_rslora", "(0, inf)",
        when="lora.kind == 'lora'", basic=True)
    dropout: float = option(0.0, "dropout on the adapter's input", "fraction [0, 1)", when="lora.kind == 'lora'",
        basic=True)
    target_modules: str | tuple[str, ...] = option("all-linear",
        "modules with adapters: all-linear (all but the head; for ia3: keys, values and down projections), a list of "
        "module names, or a regex over Hugging Face names", "regex", basic=True, also="lora_target lora_target_linear")
    dtype: Literal["float32", "bfloat16"] = option("float32",
        "dtype of everything trained: adapters, biases, and the head of a classifier")
    use_rslora: bool = option(False, "rank-stabilised scale (Kalajdzievski 2023)", when="lora.kind == 'lora'")
    path: str | None = option(None, "PEFT adapter folder to start from", also="adapter_name_or_path lora_model_dir")
    merge_interval: int = option(0,
        "steps between merges (ReLoRA, 2023): adapters are merged into the weights, requantized if quantized, and "
        "restart; such a run exports the whole model; 0: never", "steps [0, inf)")
    reset_on_merge: bool = option(False, "reset the optimizer state of everything trained when adapters are merged",
        when="lora.merge_interval")
    lr_ratio: float = option(1.0,
        "learning rate of B, biases and other vectors as a multiple of A's, optim.learning_rate, such as 16 (LoRA+, "
        "Hayou et al. 2024)", "(0, inf)", when="lora.kind == 'lora'")
    bias: Literal["none", "all", "lora_only"] = option("none",
        "biases of the model trained with the adapters: none, all, or only in layers with an adapter (lora_only)",
        when="lora.kind == 'lora'")
    kind: Literal["lora", "ia3"] = option("lora",
        "lora: low-rank matrices added to the weights; ia3: learned factors on the input of down projections and the "
        "output of other layers ((IA)^3, Liu et al. 2022)")
    use_dora: bool = option(False,
        "weight-decomposed adapters: a trained magnitude for each row of the weight and its adapter (DoRA, Liu et al. "
        "2024)", when="lora.kind == 'lora'")
    init: Literal["uniform", "gaussian", "pissa", "olora"] = option("uniform",
        "uniform, gaussian: random A, zero B; pissa: the weight's top singular vectors; olora: its first columns, "
        "orthonormalised; both subtract them from the weight, and are exported as plain adapters of twice the rank",
        when="lora.kind == 'lora' and lora.path is None")
    freeze_a: bool = option(False, "train only B (LoRA-FA, Zhang et al. 2023)", when="lora.kind == 'lora'")
    rank_pattern: tuple[str, ...] = option((), "rank by Hugging Face name; the last match counts: ('q_proj=8',)",
        "REGEX=FACTOR", when="lora.kind == 'lora'")
    alpha_pattern: tuple[str, ...] = option((), "alpha by Hugging Face name; the last match counts: ('q_proj=16',)",
        "REGEX=FACTOR", when="lora.kind == 'lora'")
    layers_to_transform: tuple[int, ...] = option((), "layers that have adapters, numbered from 0; (): all",
        "layers [0, inf)")
    modules_to_save: tuple[str, ...] = option((),
        "modules trained in full together with the adapters, such as ('embed_tokens', 'lm_head')")
# fmt: on


def check_lora(config: Config) -> Iterator[Problem]:
    """Yield contradictions of section `lora` with others."""
    lora = config.lora
    if not lora.enabled:
        return
    if config.model.from_scratch:
        reason = (
            "adapters on random weights learn nothing; train the whole model (lora.enabled = False) or load weights"
        )
        yield problem(config, "model.from_scratch", reason, "lora.enabled")
    if not lora.target_modules:
        yield problem(config, "lora.target_modules", "must name at least one module, or be 'all-linear'")
    if lora.target_modules in ("all", "linear", "all_linear"):
        yield problem(config, "lora.target_modules", "no module has this name; 'all-linear' selects all linear layers")
    if lora.kind == "ia3":
        if lora.merge_interval:
            yield problem(
                config, "lora.merge_interval", "only low-rank matrices can be merged, not factors", "lora.kind"
            )
        if config.rollout.server is not None:
            yield problem(config, "lora.kind", "a server supports only low-rank adapters", "rollout.server")
        if config.optim.properties.for_matrices:
            reason = "it orthogonalises matrices, and ia3 trains vectors; use adamw"
            yield problem(config, "optim.name", reason, "lora.kind")
    for key in ("lora.kind", "lora.bias", "lora.use_dora", "lora.init", "lora.freeze_a", "lora.modules_to_save"):
        # The tuple lists the values that work in a pipeline.
        if config.mesh.stage != 1 and value_of(config, key) not in ("lora", "none", False, "uniform", "gaussian", ()):
            yield problem(config, key, "not available with mesh.stage yet; use mesh.fsdp", "mesh.stage")
    for key in ("lora.bias", "lora.use_dora", "lora.modules_to_save"):
        if config.rollout.server is not None and value_of(config, key) not in ("none", False, ()):
            yield problem(config, key, "a server supports only low-rank matrices", "rollout.server")
