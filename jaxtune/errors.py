"""The one exception that is shown to a user as a message, without a traceback."""


class UserError(Exception):
    """What was wrong, where (file, line, key, tensor), and what would be right."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback, the lines of it."""
        return [f"jaxtune: error: {self}"]
