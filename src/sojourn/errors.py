"""The errors a user can cause, told in one line that says what to type."""


class UserError(Exception):
    """What was wrong, where, and what to type instead. Shown without a traceback; the command exits with `code`."""

    code = 2


class RunFailed(UserError):
    """The input was right but the work could not be done (a full disk, a broken file): exit 1."""

    code = 1


class Stopped(UserError):
    """The run stopped at a limit or a signal, saved, and can be continued: exit 3."""

    code = 3
