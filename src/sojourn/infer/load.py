"""Opens a model to talk to: a run by its name, or any folder that plain transformers opens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sojourn.errors import RunFailed, UserError
from sojourn.machine.precision import choose_device
from sojourn.model.quiet import quiet_transformers
from sojourn.run.home import find_run


@dataclass(frozen=True)
class Model:
    """A model with its tokenizer, ready on its device."""

    folder: Path
    network: Any
    tokenizer: Any
    device: str

    @property
    def context(self) -> int:
        """How many tokens it can hold."""
        return int(self.network.config.max_position_embeddings)

    @property
    def is_chat(self) -> bool:
        return bool(self.tokenizer.chat_template)


def find_model(word: str) -> Path:
    """The folder of a model: `word` itself, or the `final/` of the run of that name."""
    folder = Path(word).expanduser()
    if (folder / "config.json").is_file():
        return folder
    run = find_run(word)
    if (run.final / "config.json").is_file():
        return run.final
    status = run.status()
    where = f" (step {status.step} of {status.total_steps})" if status else ""
    raise UserError(f"{run.path}: not finished yet{where}; continue it with: sojourn train {run.config}")


def open_model(word: str, device: str = "auto") -> Model:
    folder = find_model(word)
    place = choose_device(device)
    quiet_transformers()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        network = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    except (OSError, ValueError) as error:
        why = str(error).strip().splitlines()[0]
        needs = "config.json, tokenizer.json and model.safetensors"
        raise RunFailed(f"{folder}: cannot be opened as a model (it needs {needs}): {why}") from None
    return Model(folder, network.to(place).eval(), tokenizer, place)
