"""The one exception that is shown to a user as a message, without a traceback."""


class UserError(Exception):
    """What was wrong, where (file, line, key, tensor), and what would be right."""
