"""Errors that are shown as one line, without a traceback. Each class has its exit code."""


class UserError(Exception):
    """Wrong input: the message says what is wrong, where, and what to type instead."""

    code = 2


class RunFailed(UserError):
    """The input was right, but the run failed (a full disk, a broken file)."""

    code = 1


class Stopped(UserError):
    """The run stopped at a limit or a signal, is saved, and can be resumed."""

    code = 3
