"""A new run that starts from another run's checkpoint, with other settings."""

from __future__ import annotations

from sojourn.config.load import with_settings
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.run.home import run_folder


def fork_run(config: RunConfig, name: str) -> RunConfig:
    """`config` under another name, starting from the newest checkpoint of the run that it names now."""
    old = run_folder(config.name or "run", config.save.folder)
    if not old.exists():
        raise UserError(
            f"--fork: {old.path} is not a run yet, so there is no checkpoint to start from; leave out --fork"
        )
    new = run_folder(name)
    if new.path.resolve() == old.path.resolve():
        raise UserError(f"--fork: {name} is the same run; give another name")
    return with_settings(config, {"name": name, "save.folder": None, "save.resume": str(old.path.resolve())})
