"""The one exception that is shown to a user as a message, without a traceback."""


class UserError(Exception):
    """What was wrong, where (file, line, key, tensor), and what would be right."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback, the lines of it."""
        return [f"jaxtune: error: {self}"]


def printable(text: str) -> str:
    """A text that others wrote, as one that cannot steer a terminal: control characters as escapes, \\x1b for one."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
