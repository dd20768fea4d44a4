"""A laptop: its own home and configuration, and the real command in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from fork_server import ForkServer
from remote_box import RemoteBox

RUN = ("smoke", "train.steps=24", "train.global_batch=4", "model.d_model=64", "data.vocab_size=400",
       "data.max_length=64", "train.device=cpu", "train.precision=fp32", "save.every_steps=4", "log.every_steps=1",
       "log.tensorboard=off", "limits.session=off")  # fmt: skip


@dataclass
class Laptop:
    folder: Path
    extra: dict[str, str] | None = None
    fork_server: ForkServer | None = None  # the processes need not import everything anew

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def env(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SOJOURN_", "HF_TOKEN"))}
        own = {"SOJOURN_HOME": str(self.home), "SOJOURN_CONFIG": str(self.folder / "config"), "HOME": str(self.folder)}
        return {**kept, **own, **(self.extra or {})}

    def start(self, *words: str, stdin: int = subprocess.DEVNULL, **env: str) -> subprocess.Popen[str]:
        self.home.mkdir(parents=True, exist_ok=True)
        return subprocess.Popen(
            [sys.executable, "-m", "sojourn", *words], cwd=self.home, env={**self.env, **env}, text=True,
            stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(
        self, *words: str, code: int | None = 0, timeout: float = 300, **env: str
    ) -> subprocess.CompletedProcess[str]:
        if self.fork_server is not None:
            self.home.mkdir(parents=True, exist_ok=True)
            done = self.fork_server.run(*words, timeout=timeout, env={**self.env, **env}, cwd=str(self.home))
            assert code is None or done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
            return done
        process = self.start(*words, **env)
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
        assert code is None or process.returncode == code, f"exit {process.returncode}\n{out}\n{err}"
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def add(self, box: RemoteBox, name: str = "box", *words: str) -> None:
        self.run("host", "add", name, box.ssh_line, "--price", "¥2", *words, SOJOURN_SSH_PASSWORD=box.password)

    def weights(self, run: str) -> bytes:
        return (self.home / "runs" / run / "final" / "model.safetensors").read_bytes()
