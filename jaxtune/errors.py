"""The one exception that is shown to a user as a message, without a traceback, and what messages must not hold."""

import re

HIDDEN = "HIDDEN"
"""What is shown and saved in the place of a secret in a URL."""
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(?:([^\s/?#\"'<>]*)@)?([^\s?#\"'<>]*)([?#][^\s\"<>]*)?", re.IGNORECASE)
_PLAIN = {"dl", "download", "export", "format", "inline", "raw", "ref", "version", "versionid"}  # of queries

_LONGEST, _KEPT = 4000, 500


def shortened(text: str) -> str:
    """A text whose long lines lack their middle: a value that a line repeats may have megabytes."""
    if len(text) <= _LONGEST:
        return text
    return "\n".join(_short(line) for line in text.split("\n"))


def _short(line: str) -> str:
    cut = len(line) - 2 * _KEPT
    return line if len(line) <= _LONGEST else f"{line[:_KEPT]}... ({cut:,} characters) ...{line[-_KEPT:]}"


def is_failure(error: BaseException) -> bool:
    """Whether it is an Exception, or a panic of a library in Rust (tokenizers), which Python does not call one."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class UserError(Exception):
    """What was wrong, where (file, line, key, tensor), and what would be right. Secrets in URLs are hidden."""

    def __init__(self, *parts: object):
        super().__init__(*(shortened(hide_secrets(part)) if isinstance(part, str) else part for part in parts))

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback, the lines of it."""
        return [f"jaxtune: error: {self}"]


def printable(text: str) -> str:
    """A text that others wrote, as one that cannot steer a terminal: control characters as escapes, \\x1b for one."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def hide_secrets(text: str) -> str:
    """A text without the secrets of its URLs: passwords, and what their queries say, but for versions and formats.

    The user without a password is not a secret in abfs://container@account, but it is in http://TOKEN@host.
    """
    return _URL.sub(_shown_url, text) if "://" in text else text


def _shown_url(url: re.Match[str]) -> str:
    scheme, user, place, query = url.groups()
    if user is not None:
        name, colon, _ = user.partition(":")
        is_token = not colon and scheme.lower() in ("http", "https")
        user = HIDDEN if is_token else f"{name}:{HIDDEN}" if colon else name
    shown, end = "", re.search(r"[).,:;\]']*$", query or "")
    rest = (query or "")[: end.start()] if end else ""
    for mark, said in re.findall(r"([?&;#])([^?&;#]*)", rest):
        key, equals, value = said.partition("=")
        is_secret = value and key.lower() not in _PLAIN if equals else said and scheme.lower() in ("http", "https")
        shown += mark + (said if not is_secret else f"{key}={HIDDEN}" if equals else HIDDEN)
    at = "" if user is None else f"{user}@"
    return f"{scheme}://{at}{place}{shown}{end[0] if end else ''}"


def refuse_hidden(url: str, option: str) -> None:
    """Raises UserError for a URL from a run's own files, which do not keep its secret."""
    if HIDDEN in url and "://" in url:
        raise UserError(f"{option}: {url}: a run's files do not keep this secret; give the whole URL again")
