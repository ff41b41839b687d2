"""Functions in files of the user's own, named FILE.py:NAME, or MODULE:NAME where Python finds the module."""

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from jaxtune.errors import UserError


def split(function: str, option: str) -> tuple[Path, str]:
    """File and name. Raises UserError, which begins with the option that named the function, unless it has both."""
    place, _, name = function.rpartition(":")
    if name.isidentifier() and place.endswith(".py"):
        return Path(place).expanduser(), name
    if not name.isidentifier() or not all(part.isidentifier() for part in place.split(".")):
        raise UserError(f"{option}={function!r} is not FILE.py:NAME, such as 'prepare.py:to_messages', or MODULE:NAME")
    try:
        spec = importlib.util.find_spec(place)
    except ImportError:
        spec = None
    if spec is None or spec.origin is None:
        raise UserError(f"{option}={function!r}: Python finds no module {place}; a file is named with its .py")
    return Path(spec.origin), name


def fingerprint(function: str, option: str) -> str:
    """Changes when the file of a function does. Raises UserError unless it is FILE.py:NAME of a file that is there."""
    path, _ = split(function, option)
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"{option}={function!r}: {error.strerror or error}") from error


def load(function: str, option: str) -> Callable[..., object]:
    """The function; its file is run."""
    path, _ = split(function, option)
    return find(run(path, f"{option}={function!r}"), function, option)


def run(path: Path, where: str) -> ModuleType:
    """The file's module. Raises UserError, which begins with `where`, if the file is not there or fails."""
    if not path.is_file():
        raise UserError(f"{where}: there is no file {path}")
    # Known to Python under a name that hides no other module, since dataclasses look their own module up.
    spec = importlib.util.spec_from_file_location(f"jaxtune_user_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the file is the user's program: it can fail in any way
        raise UserError(f"{where}: {raised_at(error, path)} fails: {type(error).__name__}: {error}") from error
    return module


def find(module: ModuleType, function: str, option: str) -> Callable[..., object]:
    """The function of that name in its file's module."""
    path, name = split(function, option)
    found = getattr(module, name, None)
    if not callable(found):
        raise UserError(f"{option}={function!r}: {path} has no function {name}")
    return found


def raised_at(error: BaseException, path: Path) -> str:
    """FILE.py:LINE, where in the user's file the error was raised or passed; the file alone if it was nowhere there."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path.absolute()]
    return f"{path}:{lines[-1]}" if lines else str(path)
