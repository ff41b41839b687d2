"""How a command speaks to a terminal and to a scheduler: its log lines and its exit codes."""

import copy
import logging

from jaxtune.errors import hide_secrets

STOPPED = 75
"""Exit code of a run that saved and stopped on request: sysexits' EX_TEMPFAIL, so that schedulers restart it."""
REFUSED = 2
"""Exit code after a UserError, which would only occur again."""


class LogFormatter(logging.Formatter):
    """Marks warnings with `warning: `, to tell them from other lines."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        if record.levelno == logging.WARNING:
            record = copy.copy(record)
            record.msg = f"warning: {record.msg}"
        return super().format(record)


def without_secrets(record: logging.LogRecord) -> bool:
    """Remove the secrets of URLs from a log record; a filter that keeps every record."""
    record.msg, record.args = hide_secrets(record.getMessage()), ()
    return True
