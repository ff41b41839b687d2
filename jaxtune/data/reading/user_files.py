"""Load functions from the user's own files, named FILE.py:NAME, or MODULE:NAME if Python can import the module."""

import ast
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from jaxtune.errors import UserError


def split(function: str, option: str) -> tuple[Path, str]:
    """Return the file and the name of a function. Raises UserError, which begins with the option, if one is missing."""
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
    """Return a hash that changes with the function's file, and with the user's own modules that the file imports.

    Raises UserError as `split`, and if the file does not exist.
    """
    path, _ = split(function, option)
    try:
        return hashlib.sha256(b"".join(file.read_bytes() for file in _with_imports(path))).hexdigest()
    except OSError as error:
        raise UserError(f"{option}={function!r}: {error.strerror or error}") from error


def _with_imports(path: Path) -> list[Path]:
    """Return a file and all files it imports, directly or not, from its folder and sys.path, except installed ones."""
    folders = [path.parent.resolve(), *(Path(folder).resolve() for folder in sys.path)]
    prefixes = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)}
    folders = [folder for folder in folders if not any(folder.is_relative_to(prefix) for prefix in prefixes)]
    imported = [path]
    for file in imported:  # grows during the loop
        try:
            nodes = list(ast.walk(ast.parse(file.read_bytes())))
        except (SyntaxError, ValueError):  # reported when the file is run
            continue
        for node in nodes:
            roots, names = folders, []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                roots = [file.resolve().parents[node.level - 1]] if node.level else folders
                start = f"{node.module}." if node.module else ""
                names = [f"{start}{alias.name}" for alias in node.names]
            for parts in (name.split(".") for name in names):
                # Importing a.b.c runs the packages a and a.b too.
                places = [root.joinpath(*parts[: n + 1]) for n in range(len(parts)) for root in roots]
                files = [file for at in places for file in (at.with_name(f"{at.name}.py"), at / "__init__.py")]
                users = parts[0] not in ("jaxtune", "pallas_kernels") or roots is not folders
                imported += [file for file in files if users and file.is_file() and file not in imported]
    return imported


def load(function: str, option: str) -> Callable[..., object]:
    """Run the function's file, and return the function."""
    return find(module_of(function, option), function, option)


def module_of(function: str, option: str) -> ModuleType:
    """Run and return the module of a function. Raises UserError, which names the option, if it is missing or fails."""
    path, _ = split(function, option)
    place, where = function.rpartition(":")[0], f"{option}={function!r}"
    if not path.is_file():
        raise UserError(f"{where}: there is no file {path}")
    try:
        return _run(path) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # the file is the user's program: it can fail in any way
        raise UserError(f"{where}: {raised_at(error, path)} fails: {type(error).__name__}: {error}") from error


def _run(path: Path) -> ModuleType:
    # The module is registered, because dataclasses look up their module in sys.modules; the hash
    # distinguishes files of the same name.
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    module = ModuleType(f"jaxtune_user_file_{path.stem}_{digest}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    # Python's own loader takes stored bytecode for a file that was changed within the second and kept its size.
    exec(compile(path.read_bytes(), path, "exec"), module.__dict__)
    return module


def find(module: ModuleType, function: str, option: str) -> Callable[..., object]:
    """Return the function from its file's module. Raises UserError if the module has no function of that name."""
    path, name = split(function, option)
    member = getattr(module, name, None)
    if not callable(member):
        raise UserError(f"{option}={function!r}: {path} has no function {name}")
    return member


def raised_at(error: BaseException, path: Path) -> str:
    """Return FILE.py:LINE, the last line of the user's file in the traceback; only the file if it is not in there."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path.absolute()]
    return f"{path}:{lines[-1]}" if lines else str(path)
