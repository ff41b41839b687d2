"""The options in the tables of foreign systems, and valid values for each."""

import typing
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtune.config import foreign, keys
from jaxtune.config.foreign import ForeignOption
from jaxtune.config.option_rules import in_interval

# Values of options that have a form of their own.
VALUES: dict[str, Any] = {
    "model.dtype": "float32",
    "chat.loss_scale": "last_round",
    "chat.agent_template": "react",
    "data.datasets[i].ds_type": "csv",
    "data.eval_datasets[i].ds_type": "csv",
    "data.datasets[i].select_columns": ["q_proj"],
    "optim.start_lr": 1e-6,
    "lora.layers_to_transform": [0, 2],
}


def options(dialect: str) -> Iterator[tuple[str, str, ForeignOption]]:
    """Yield (list whose entries have the option, its name, its row)."""
    for name, row in foreign.table(dialect).items():
        yield "", name, row
        yield from ((name, inner, of) for inner, of in row.of.items())


def promises(row: ForeignOption, key: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield values of an option, and the translation of each."""
    for text, ours in row.values.items():
        value = {"true": True, "false": False}.get(str(text).lower(), text)
        value = int(value) if str(value).lstrip("-").isdigit() else value
        settings = ours if isinstance(ours, Mapping) else {} if ours is None else dict.fromkeys(row.keys, ours)
        yield value, {key: tuple(one) if isinstance(one, list) else one for key, one in settings.items()}
    if key and (row.others or not row.values):
        value = another(key, row.default)
        yield value, dict.fromkeys(row.keys, tuple(value) if isinstance(value, list) else value)


def another(key: str, default: Any) -> Any:
    """Return a valid value of an option, other than its default here and in the other system."""
    option = keys.lookup(key)
    assert option is not None
    members = typing.get_args(option.annotation)
    if key in VALUES:
        return VALUES[key]
    if option.annotation is bool or bool in members:
        return default is not True
    if typing.get_origin(option.annotation) is typing.Literal:
        candidates = members
    elif option.annotation is float or float in members:
        candidates = (0.25, 0.5, 4096.0)
    elif option.annotation is int or int in members:
        candidates = (3, 5)
    elif typing.get_origin(option.annotation) is tuple:
        candidates = (["q_proj"],)
    else:
        candidates = ("some", "other")
    return next(
        value
        for value in candidates
        if value not in (option.default, default)
        and (isinstance(value, str | list) or in_interval(value, option.within))
    )
