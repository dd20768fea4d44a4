"""The presets that come with Sojourn, and their aliases."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sojourn.config.messages import did_you_mean, printable
from sojourn.errors import UserError

FOLDER = Path(__file__).parent / "presets"
ORDER = (
    "demo", "demo-fast", "smoke", "small", "medium", "large", "xl", "xxl",
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


def presets() -> list[Preset]:
    """All presets, from small to large; the first line of each file is its summary."""
    found = []
    for name in ORDER:
        path = FOLDER / f"{name}.yaml"
        first = path.read_text(encoding="utf-8").splitlines()[0]
        aliases = tuple(alias for alias, target in ALIASES.items() if target == name)
        found.append(Preset(name, path, first.removeprefix("# "), aliases))
    return found


def preset_names() -> tuple[str, ...]:
    """All names and aliases."""
    return (*ORDER, *ALIASES)


def find_preset(name: str) -> Path | None:
    """The file of a preset by name or alias, in any spelling (`lora_20k`, `paper_r64`, `LoRA-20k`)."""
    key = name.lower().replace("_", "-")
    key = ALIASES.get(key, key)
    return FOLDER / f"{key}.yaml" if key in ORDER else None


def get_preset(name: str) -> Path:
    path = find_preset(name)
    if path is None:
        hint = did_you_mean(name, preset_names())
        raise UserError(f"no preset called “{printable(name)}”{hint} (see: sojourn presets list)")
    return path


def copy_preset(name: str, to: Path | None) -> Path:
    """Copies a preset to a new file and returns its path; never overwrites one."""
    source = get_preset(name)
    target = to or Path(source.name)
    try:
        target = target / source.name if target.is_dir() else target
        with target.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except FileExistsError:
        where = printable(target, 200)
        raise UserError(
            f"{where} already exists; choose another name: sojourn presets copy {printable(name)} FILE"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{printable(target, 200)} cannot be written: {printable(reason)}") from None
    return target
