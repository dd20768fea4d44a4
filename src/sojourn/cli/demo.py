"""`sojourn demo`: plan, train, kill, resume and chat on this machine."""

from __future__ import annotations

import typer


def demo(
    fast: bool = typer.Option(False, "--fast", help="Train less: about 40 s in all."),
    json: bool = typer.Option(False, "--json", help="Print the outcome as JSON at the end."),
) -> None:
    """Plan, prepare, train, kill, resume and chat on this machine, with built-in data, in under 4 minutes."""
    from rich.console import Console

    from sojourn.demo.journey import run_demo
    from sojourn.demo.screen import Screen

    outcome = run_demo(fast, Screen(Console(highlight=False, stderr=json)))
    if json:
        from dataclasses import asdict
        from json import dumps

        print(dumps(asdict(outcome)))
