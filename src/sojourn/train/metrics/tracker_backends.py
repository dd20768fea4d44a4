"""The services that draw curves elsewhere, each behind the same four calls. None of them ever asks a question."""

from __future__ import annotations

import importlib.util
import netrc
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlparse

End = Literal["done", "stopped", "failed"]
PATIENCE = 30.0  # seconds; longer than this no service is waited for at the end of a run


@dataclass(frozen=True)
class RunInfo:
    """What a service is told about a run. `id` stays the same when the run is continued."""

    name: str
    project: str
    id: str
    config: dict[str, Any]
    logs: Path


class TrackerBackend(Protocol):
    """One service. `start` returns a line for the user, if there is something to say."""

    def start(self, about: RunInfo) -> str | None: ...
    def log(self, values: dict[str, float], step: int) -> None: ...
    def log_samples(self, samples: list[tuple[str, str]], step: int) -> None: ...
    def close(self, end: End) -> None: ...


class Wandb:
    def start(self, about: RunInfo) -> str | None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or "online"
        kept = mode == "online" and not self._logged_in()  # it would ask for a key
        settings = wandb.Settings(
            console="off", silent=True, save_code=False, init_timeout=PATIENCE, finish_timeout=PATIENCE
        )
        self._run = wandb.init(
            project=about.project, name=about.name, id=about.id, resume="allow", config=about.config,
            dir=str(about.logs), mode="offline" if kept else mode, settings=settings,
        )  # fmt: skip
        # A step of our own: wandb's may only grow, and a run continued after a kill does some steps twice.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        if kept:
            return (
                f"wandb: not logged in; to send the curves later: wandb login; wandb sync {about.logs}/wandb/offline-*"
            )
        return f"wandb: {self._run.url}" if self._run.url else None

    @staticmethod
    def _logged_in() -> bool:
        if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
            return True
        host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
        named = os.environ.get("NETRC")
        for path in [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]:
            try:
                if host in netrc.netrc(str(path.expanduser())).hosts:
                    return True
            except (OSError, netrc.NetrcParseError):
                continue
        return False

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def log_samples(self, samples: list[tuple[str, str]], step: int) -> None:
        import wandb

        table = wandb.Table(columns=["prompt", "text"], data=[list(pair) for pair in samples])
        self._run.log({"samples": table, "step": step})

    def close(self, end: End) -> None:
        self._run.finish(exit_code=int(end == "failed"))


class Swanlab:
    def start(self, about: RunInfo) -> str | None:
        import swanlab

        settings = swanlab.Settings(interactive=False, terminal={"proxy_type": "none"})
        kept = settings.mode == "online" and settings.api_key is None
        folder = about.logs / "swanlab"
        folder.mkdir(parents=True, exist_ok=True)
        self._run = swanlab.init(
            project=about.project, name=about.name, id=about.id, resume="allow", config=about.config,
            log_dir=str(folder), mode="offline" if kept else settings.mode, settings=settings,
        )  # fmt: skip
        if kept:
            return f"swanlab: not logged in; to send the curves later: swanlab login; swanlab sync {folder}/run-*"
        return None

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def log_samples(self, samples: list[tuple[str, str]], step: int) -> None:
        import swanlab

        self._run.log({"samples": [swanlab.Text(text, caption=prompt) for prompt, text in samples]}, step=step)

    def close(self, end: End) -> None:
        state = {"done": "success", "stopped": "aborted", "failed": "crashed"}[end]
        self._run.finish(state=state, error="see events.jsonl of the run" if end == "failed" else None)


class Mlflow:
    def start(self, about: RunInfo) -> str | None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        place = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(tracking_uri=place or self._own_place(about.logs / "mlflow"))
        found = self._client.get_experiment_by_name(about.project)
        artifacts = None if place else (about.logs / "mlflow" / "artifacts").resolve().as_uri()
        where = found.experiment_id if found else self._client.create_experiment(about.project, artifacts)
        ours = self._client.search_runs([where], filter_string=f"tags.`sojourn.id` = '{about.id}'")
        if ours:
            self._id = ours[0].info.run_id
            self._client.set_terminated(self._id, status="RUNNING")
        else:
            made = self._client.create_run(where, tags={"sojourn.id": about.id}, run_name=about.name)
            self._id = made.info.run_id
            params = [Param(key, str(value)[:500]) for key, value in about.config.items()]
            for first in range(0, len(params), 100):  # as many as it takes in one go
                self._client.log_batch(self._id, params=params[first : first + 100])
        return None

    @staticmethod
    def _own_place(folder: Path) -> str:
        """A data base, which `mlflow ui` opens; the slim package has none and writes a folder of files."""
        folder.mkdir(parents=True, exist_ok=True)
        if importlib.util.find_spec("sqlalchemy") and importlib.util.find_spec("alembic"):
            return f"sqlite:///{(folder / 'mlflow.db').resolve().as_posix()}"
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        return (folder / "mlruns").resolve().as_uri()

    def log(self, values: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self._id, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def log_samples(self, samples: list[tuple[str, str]], step: int) -> None:
        text = "\n\n".join(f"> {prompt}\n{said}" for prompt, said in samples)
        self._client.log_text(self._id, text, f"samples/step-{step:08}.txt")

    def close(self, end: End) -> None:
        self._client.set_terminated(self._id, status={"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[end])


class Trackio:
    def start(self, about: RunInfo) -> str | None:
        import trackio

        # It knows runs by their names only, and a folder or space of the user's may hold others of this name.
        name = f"{about.name}-{about.id[:6]}"
        self._run = trackio.init(
            project=about.project,
            name=name,
            resume="allow",
            config=about.config,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return None

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def log_samples(self, samples: list[tuple[str, str]], step: int) -> None:
        import trackio

        text = "\n\n".join(f"**{prompt}**\n\n{said}" for prompt, said in samples)
        self._run.log({"samples": trackio.Markdown(text)}, step=step)

    def close(self, end: End) -> None:
        self._run.finish()


BACKENDS: dict[str, type[TrackerBackend]] = {"wandb": Wandb, "swanlab": Swanlab, "mlflow": Mlflow, "trackio": Trackio}
