"""How a command speaks to a terminal and to a scheduler: its log lines and its exit codes."""

import copy
import logging

from jaxtune.errors import hide_secrets

STOPPED = 75
"""Exit code of a run that was asked to stop and has saved: sysexits' EX_TEMPFAIL, so that schedulers restart it."""
REFUSED = 2
"""Exit code after a UserError, which the same command would only meet again."""


class LogFormatter(logging.Formatter):
    """Says of a warning that it is one, so that it does not look like any other line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        if record.levelno == logging.WARNING:
            record = copy.copy(record)
            record.msg = f"warning: {record.msg}"
        return super().format(record)


def without_secrets(record: logging.LogRecord) -> bool:
    """A filter that takes the secrets of URLs out of a record."""
    record.msg, record.args = hide_secrets(record.getMessage()), ()
    return True
