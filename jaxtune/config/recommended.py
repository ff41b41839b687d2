"""Rules of thumb for learning rate and warm-up (`train.recommend`), by training mode and model size."""

import math
from collections.abc import Callable, Iterator, Set

from jaxtune.config.schema import Config, ModelOptions
from jaxtune.errors import UserError

ERNIEKIT = "ERNIEKit's training configuration, 1.3"
QLORA = "Dettmers et al. 2023, table 9"
GPT3 = "Brown et al. 2020, table 2.1"
ADAMW = ("adamw", "adamw_8bit")  # optimizers that the rates below are for

# mode, largest model in billions of parameters, peak learning rate, source
LEARNING_RATES = (
    ("pretraining", 0.2, 6e-4, GPT3),
    ("pretraining", 0.6, 3e-4, GPT3),
    ("pretraining", 1.0, 2.5e-4, GPT3),
    ("pretraining", 2.0, 2e-4, GPT3),
    ("pretraining", 4.0, 1.6e-4, GPT3),
    ("pretraining", 10.0, 1.2e-4, GPT3),
    ("pretraining", 20.0, 1e-4, GPT3),
    ("pretraining", math.inf, 6e-5, GPT3),
    ("preferences", math.inf, 1e-6, ERNIEKIT),
    ("preferences, LoRA", math.inf, 1e-5, ERNIEKIT),
    ("full", math.inf, 3e-5, ERNIEKIT),
    ("LoRA", math.inf, 3e-4, ERNIEKIT),
    ("QLoRA", 20.0, 2e-4, QLORA),
    ("QLoRA", math.inf, 1e-4, QLORA),
)
WARMUP_RATIO = 0.03, f"1% to 10% of steps: {ERNIEKIT}"


CountParameters = Callable[[ModelOptions], int]
"""Count the parameters of a model by its config.json, which is downloaded if necessary."""


def recommend(
    config: Config, told: Set[str], count: CountParameters | None
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return recommended values for the training mode and model size.

    Args:
        config: All options.
        told: Keys that the user or the recipe set; these keep their values.
        count: Called only if a recommendation depends on the size.

    Returns:
        Values by key, and a line for the user about each recommendation.

    Raises:
        UserError: A recommendation depends on the size, and there is no `count`.
    """
    values, lines = {}, []
    for key, value, why in _advice(config, count):
        mine = sorted(told & ({key, "optim.warmup_steps"} if key == "optim.warmup_ratio" else {key}))
        if value is None:
            lines.append(f"recommended: nothing for {key}: {why}")
        elif mine:
            lines.append(f"recommended: {key} = {value:g} ({why}), but {' and '.join(mine)} is set and stays")
        else:
            lines.append(f"recommended: {key} = {value:g} ({why})")
            values[key] = value
    return values, tuple(lines)


def _advice(config: Config, count: CountParameters | None) -> Iterator[tuple[str, float | None, str]]:
    """Yield (key, value, reason); the value is None without a recommendation."""
    mode = _mode(config)
    if mode is None:
        yield "optim.learning_rate", None, "there is no rule of thumb for reward models"
    elif config.optim.name in ADAMW:
        rates = [(most, rate, source) for of, most, rate, source in LEARNING_RATES if of == mode]
        size = _billions(config, count) if len(rates) > 1 else 0.0
        rate, source = next((rate, source) for most, rate, source in rates if size <= most)
        of = f"{mode}, {size:.2g} billion parameters" if len(rates) > 1 else mode
        yield "optim.learning_rate", rate, f"{of}: {source}"
    else:
        yield "optim.learning_rate", None, f"rules of thumb are for AdamW, not for optim.name = {config.optim.name!r}"
    yield "optim.warmup_ratio", *WARMUP_RATIO


def _mode(config: Config) -> str | None:
    if config.preference.loss is not None:
        if config.preference.properties.samples == "scored pairs":
            return None
        return "preferences, LoRA" if config.lora.enabled else "preferences"
    if config.model.from_scratch:
        return "pretraining"
    if not config.lora.enabled:
        return "full"
    return "LoRA" if config.quant.format is None else "QLoRA"


def _billions(config: Config, count: CountParameters | None) -> float:
    if count is None:
        raise UserError("train.recommend depends on the size of the model here; jaxtune.config_of(recipe) reads it")
    return count(config.model) / 1e9
