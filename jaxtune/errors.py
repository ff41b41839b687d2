"""UserError, which is shown as a message without a traceback, and texts that messages share."""

import difflib
import re
from pathlib import Path

HIDDEN = "HIDDEN"
"""Placeholder that is shown and saved in place of a secret in a URL."""
# Groups: scheme, user and password, host and path, query or fragment.
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(?:([^\s/?#\"'<>]*)@)?([^\s?#\"'<>]*)([?#][^\s\"<>]*)?", re.IGNORECASE)
_PLAIN = {"dl", "download", "export", "format", "inline", "raw", "ref", "version", "versionid"}  # harmless query keys

_LONGEST, _KEPT = 4000, 500  # characters: the longest line shown whole, and the length of each end of a cut one


def shorten(text: str) -> str:
    """Cut the middle out of long lines, because a line may quote a value of megabytes."""
    if len(text) <= _LONGEST:
        return text
    return "\n".join(_short(line) for line in text.split("\n"))


def _short(line: str) -> str:
    cut = len(line) - 2 * _KEPT
    return line if len(line) <= _LONGEST else f"{line[:_KEPT]}... ({cut:,} characters) ...{line[-_KEPT:]}"


def is_failure(error: BaseException) -> bool:
    """Whether an error is an Exception or a panic of a Rust library (tokenizers), which derives from BaseException."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class UserError(Exception):
    """An error that the user can mend; its message is shown without a traceback.

    The message says what is wrong, where (file, line, key, tensor) and what would be right. Secrets in URLs are hidden.
    """

    def __init__(self, *parts: object):
        super().__init__(*(shorten(hide_secrets(part)) if isinstance(part, str) else part for part in parts))

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of a traceback."""
        return [f"jaxtune: error: {self}"]


def format_count(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: "1 document", "1,200 documents"."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def format_bytes(size: float, digits: int = 2) -> str:
    """Return a number of bytes with its unit: "1.50 GB", below 1 GB "1.5 MB", and below 0.1 MB "1.5 kB"."""
    if size >= 1e9:
        return f"{size / 1e9:.{digits}f} GB"
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


def near_paths(path: Path) -> str:
    """Return " (near it: ...)" with up to three existing paths whose names resemble a missing one, or ""."""
    parent = path.expanduser().parent
    while not parent.is_dir():
        path, parent = parent, parent.parent
    names = sorted(entry.name for entry in parent.iterdir() if not entry.name.startswith("."))
    near = difflib.get_close_matches(path.name, names, n=3)
    return f" (near it: {', '.join(str(parent / name) for name in near)})" if near else ""


def printable(text: str) -> str:
    """Escape control characters, such as \\x1b, in a text from outside, so that it cannot control the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def hide_secrets(text: str) -> str:
    """Hide the secrets of URLs in a text: passwords and query values, except for versions and formats.

    A user without a password is a secret in http://TOKEN@host, but not in abfs://container@account.
    """
    return _URL.sub(_shown_url, text) if "://" in text else text


def _shown_url(url: re.Match[str]) -> str:
    scheme, user, place, query = url.groups()
    if user is not None:
        name, colon, _ = user.partition(":")
        is_token = not colon and scheme.lower() in ("http", "https")
        user = HIDDEN if is_token else f"{name}:{HIDDEN}" if colon else name
    # Punctuation at the end belongs to the sentence that quotes the URL.
    shown, end = "", re.search(r"[).,:;\]']*$", query or "")
    rest = (query or "")[: end.start()] if end else ""
    for mark, item in re.findall(r"([?&;#])([^?&;#]*)", rest):
        key, equals, value = item.partition("=")
        is_secret = value and key.lower() not in _PLAIN if equals else item and scheme.lower() in ("http", "https")
        shown += mark + (item if not is_secret else f"{key}={HIDDEN}" if equals else HIDDEN)
    at = "" if user is None else f"{user}@"
    return f"{scheme}://{at}{place}{shown}{end[0] if end else ''}"


def refuse_hidden(url: str, option: str) -> None:
    """Raise UserError for a URL from a run's own files whose secret was hidden."""
    if HIDDEN in url and "://" in url:
        raise UserError(f"{option}: {url}: a run's files do not keep this secret; give the whole URL again")
