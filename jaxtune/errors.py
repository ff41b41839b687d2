"""The one exception that is shown to a user as a message, without a traceback."""

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
    """What was wrong, where (file, line, key, tensor), and what would be right."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback, the lines of it."""
        return [f"jaxtune: error: {self}"]
