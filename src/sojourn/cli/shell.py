"""`sojourn shell`: a shell on a host."""

from __future__ import annotations

import typer

from sojourn.cli.gpu import HostOrRun


def shell(name: HostOrRun) -> None:
    """Open a shell on a host, with its pinned key and our SSH key. Needs OpenSSH's ssh here."""
    from sojourn.remote.verbs import open_shell

    raise typer.Exit(open_shell(name))
