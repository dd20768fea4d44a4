"""Experiment trackers (wandb, swanlab, mlflow, trackio) behind one interface. None of them ever prompts."""

from __future__ import annotations

import importlib.util
import netrc
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlparse

from sojourn.expand_user import expand_user

End = Literal["done", "stopped", "failed"]
CLOSE_TIMEOUT = 30.0  # seconds for all trackers at the end of a run


@dataclass(frozen=True)
class RunInfo:
    """`id` stays the same when the run resumes."""

    name: str
    project: str
    id: str
    config: dict[str, Any]
    logs: Path


class TrackerBackend(Protocol):
    """One tracker. `start` may return a line for the user."""

    def start(self, run: RunInfo) -> str | None: ...
    def log(self, values: dict[str, float], step: int) -> None: ...
    def log_samples(self, samples: list[tuple[str, str]], step: int) -> None: ...
    def close(self, end: End) -> None: ...


class Wandb:
    def start(self, run: RunInfo) -> str | None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or "online"
        offline = mode == "online" and not self._logged_in()  # it would prompt for a key
        settings = wandb.Settings(
            console="off", silent=True, save_code=False, init_timeout=CLOSE_TIMEOUT, finish_timeout=CLOSE_TIMEOUT
        )
        self._run = wandb.init(
            project=run.project, name=run.name, id=run.id, resume="allow", config=run.config,
            dir=str(run.logs), mode="offline" if offline else mode, settings=settings,
        )  # fmt: skip
        # Our own step: wandb's must increase, and a run resumed after a kill repeats some steps.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        if offline:
            return f"wandb: not logged in; to upload later: wandb login; wandb sync {run.logs}/wandb/offline-*"
        return f"wandb: {self._run.url}" if self._run.url else None

    @staticmethod
    def _logged_in() -> bool:
        if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
            return True
        host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
        named = os.environ.get("NETRC")
        for path in [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]:
            try:
                if host in netrc.netrc(str(expand_user(path))).hosts:
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
    def start(self, run: RunInfo) -> str | None:
        import swanlab

        settings = swanlab.Settings(interactive=False, terminal={"proxy_type": "none"})
        offline = settings.mode == "online" and settings.api_key is None
        folder = run.logs / "swanlab"
        folder.mkdir(parents=True, exist_ok=True)
        self._run = swanlab.init(
            project=run.project, name=run.name, id=run.id, resume="allow", config=run.config,
            log_dir=str(folder), mode="offline" if offline else settings.mode, settings=settings,
        )  # fmt: skip
        if offline:
            return f"swanlab: not logged in; to upload later: swanlab login; swanlab sync {folder}/run-*"
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
    def start(self, run: RunInfo) -> str | None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(tracking_uri=uri or self._local_uri(run.logs / "mlflow"))
        experiment = self._client.get_experiment_by_name(run.project)
        artifacts = None if uri else (run.logs / "mlflow" / "artifacts").resolve().as_uri()
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(run.project, artifacts)
        )
        runs = self._client.search_runs([experiment_id], filter_string=f"tags.`sojourn.id` = '{run.id}'")
        if runs:
            self._id = runs[0].info.run_id
            self._client.set_terminated(self._id, status="RUNNING")
        else:
            made = self._client.create_run(experiment_id, tags={"sojourn.id": run.id}, run_name=run.name)
            self._id = made.info.run_id
            params = [Param(key, str(value)[:500]) for key, value in run.config.items()]
            for first in range(0, len(params), 100):  # the most it accepts at once
                self._client.log_batch(self._id, params=params[first : first + 100])
        return None

    @staticmethod
    def _local_uri(folder: Path) -> str:
        """An SQLite database for `mlflow ui`; the slim package has none and writes a folder of files."""
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
        text = "\n\n".join(f"> {prompt}\n{text}" for prompt, text in samples)
        self._client.log_text(self._id, text, f"samples/step-{step:08}.txt")

    def close(self, end: End) -> None:
        self._client.set_terminated(self._id, status={"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[end])


class Trackio:
    def start(self, run: RunInfo) -> str | None:
        import trackio

        # trackio identifies runs by name only, and the user's folder or Space may hold others of this name.
        name = f"{run.name}-{run.id[:6]}"
        self._run = trackio.init(
            project=run.project,
            name=name,
            resume="allow",
            config=run.config,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return None

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def log_samples(self, samples: list[tuple[str, str]], step: int) -> None:
        import trackio

        text = "\n\n".join(f"**{prompt}**\n\n{text}" for prompt, text in samples)
        self._run.log({"samples": trackio.Markdown(text)}, step=step)

    def close(self, end: End) -> None:
        self._run.finish()


BACKENDS: dict[str, type[TrackerBackend]] = {"wandb": Wandb, "swanlab": Swanlab, "mlflow": Mlflow, "trackio": Trackio}
