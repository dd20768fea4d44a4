"""The named configurations that come with Sojourn, and the guides' spellings for them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from sojourn.config.explain import closest
from sojourn.errors import UserError

ORDER = (
    "demo", "smoke", "small", "medium", "large", "xl", "xxl",
    "lora-20k", "lora-50k", "lora-100k", "lora-r64", "lora-r320", "qlora-7b", "qlora-14b", "full-7b",
)  # fmt: skip
ALIASES = {
    "tiny": "small",
    "256x2": "small",
    "128x1": "smoke",
    "512x6": "medium",
    "768x6": "large",
    "1024x12": "xl",
    "2048x24": "xxl",
    "paper-r64": "lora-r64",
    "r64": "lora-r64",
    "pretrained-r320": "lora-r320",
    "r320": "lora-r320",
    "qlora": "qlora-7b",
    "lora": "lora-20k",
    "full": "full-7b",
}


@dataclass(frozen=True)
class Preset:
    name: str
    path: Path
    summary: str
    aliases: tuple[str, ...]


def _folder() -> Path:
    return Path(str(resources.files("sojourn.config"))) / "presets"


def presets() -> list[Preset]:
    """All of them, in the order a newcomer would meet them; a preset's first line says what it is."""
    found = []
    for name in ORDER:
        path = _folder() / f"{name}.yaml"
        first = path.read_text(encoding="utf-8").splitlines()[0]
        aliases = tuple(alias for alias, target in ALIASES.items() if target == name)
        found.append(Preset(name, path, first.removeprefix("# "), aliases))
    return found


def find_preset(word: str) -> Path | None:
    """The preset called `word`, in any of its spellings (`lora_20k`, `paper_r64`, `LoRA-20k`)."""
    name = word.lower().replace("_", "-")
    path = _folder() / f"{ALIASES.get(name, name)}.yaml"
    return path if "/" not in name and "\\" not in name and name and "\0" not in name and path.is_file() else None


def preset(word: str) -> Path:
    path = find_preset(word)
    if path is None:
        names = [p.name for p in presets()] + list(ALIASES)
        raise UserError(f"no preset is called “{word}”{closest(word.replace('_', '-'), names)} (see: sojourn presets list)")
    return path


def copy(word: str, to: Path | None) -> Path:
    """Copies a preset to a new file and returns it; an existing file is left alone."""
    source = preset(word)
    target = to or Path(source.name)
    if target.is_dir():
        target = target / source.name
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except FileExistsError:
        raise UserError(f"{target} is already there; give another name: sojourn presets copy {word} FILE") from None
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror}") from None
    return target
