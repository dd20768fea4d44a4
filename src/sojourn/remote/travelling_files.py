"""The files that a run's settings name: each is found here and given its path on the box.

Names on the box are decided by content (`remote_names.py`). Names of the hub and `builtin:` data stay as they are.
Problems are collected, so that the user sees all of them at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from sojourn.config.data import Source
from sojourn.config.messages import printable
from sojourn.data.sources.files import find_files, user_path
from sojourn.data.sources.hub import is_hub_name
from sojourn.errors import UserError
from sojourn.remote.remote_names import data_file_name, data_folder_names, folder_name
from sojourn.run.checkpoints import MANIFEST, checkpoint_path, find_damage, list_checkpoints
from sojourn.storage.file_digests import FileDigests

Item = tuple[Path, str]  # a file here, and its path on the box
_WINDOWS = re.compile(r"[A-Za-z]:[\\/]|\\\\")
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "config.json", "generation_config.json",
)  # fmt: skip
# The same weights once more, beside model.safetensors
_OTHER_WEIGHTS = ("pytorch_model*.bin", "*.pth", "consolidated*", "*.msgpack", "*.h5", "*.onnx")


class TravellingFiles:
    """`folder`: the box's folder for them. Methods return what the setting becomes on the box."""

    def __init__(self, folder: str, project: Path, digests: FileDigests) -> None:
        self._folder, self._project, self._digests = folder, project.resolve(), digests
        self._items: dict[str, Path] = {}
        self._links: list[tuple[Path, Path]] = []
        self.notes: list[str] = []
        self.refusals: list[str] = []
        self.from_hub: list[str] = []  # settings whose values the box downloads

    @property
    def items(self) -> list[Item]:
        """By their paths on the box."""
        return [(local, remote) for remote, local in sorted(self._items.items())]

    def data_source(self, source: Source, key: str) -> Source:
        try:
            return self._data_source(source, key)
        except UserError as error:
            self.refusals.append(str(error).replace("data.sources:", f"{key}:", 1))
            return source

    def _data_source(self, source: Source, key: str) -> Source:
        path = source.path
        if path.startswith("builtin:"):
            return source
        given = user_path(path, key)
        if not given.exists():
            self._refuse_windows_path(path, key)
            if is_hub_name(path):
                self.from_hub.append(key)
                self.notes.append(f"{key}: {printable(path)}: the box downloads it from the hub")
                return source
        files = find_files(path)
        if given.is_file():
            remote = f"{self._folder}/{data_file_name(given, self._digests)}"
            self._add(given, remote)
        else:
            stem = given.resolve().name if given.is_dir() else "files"
            name, names = data_folder_names(stem, files, self._digests)
            remote = f"{self._folder}/{name}"
            for file, below in zip(files, names, strict=True):
                self._add(file, f"{remote}/{below}")
        self._note_outside(path, given if given.exists() else files[0], key, remote)
        return source.model_copy(update={"path": remote})

    def model(self, value: str, key: str) -> str:
        """A folder, a GGUF file, or a name on the hub."""
        path = self._existing(value, key, hub=True)
        if path is None:
            return value
        if path.is_dir():
            return self._whole_folder(path, key)
        if path.suffix.lower() != ".gguf":
            raise UserError(f"{key}: {printable(value)}: a file, but no .gguf; name a model's folder")
        return self._file_in_folder(path, key)

    def adapter(self, value: str, key: str) -> str:
        path = self._existing(value, key, hub=True)
        return value if path is None else self._whole_folder(path, key)

    def tokenizer(self, value: str, key: str) -> str:
        """A folder (of a tokenizer or a whole model), one of its files, a GGUF file, or a model on the hub."""
        path = self._existing(value, key, hub=True)
        if path is None:
            return value
        if path.suffix.lower() == ".gguf":
            return self._file_in_folder(path, key)
        folder = path if path.is_dir() else path.parent
        names = [*_TOKENIZER_FILES, *([path.name] if path.is_file() else [])]
        files = [folder / name for name in dict.fromkeys(names) if (folder / name).is_file()]
        if not files:
            raise UserError(f"{key}: {printable(value)}: it has no tokenizer.json and no tokenizer.model")
        remote = self._add_folder(folder, files)
        self._note_outside(value, path, key, remote)
        return remote if path.is_dir() else f"{remote}/{path.name}"

    def file(self, value: str, key: str) -> str:
        """A template or a DeepSpeed file."""
        path = self._existing(value, key, hub=False)
        if path is None or not path.is_file():
            raise UserError(f"{key}: {printable(value)}: no such file; check the spelling")
        remote = f"{self._folder}/{data_file_name(path, self._digests)}"
        self._add(path, remote)
        self._note_outside(value, path, key, remote)
        return remote

    def checkpoint(self, value: str, key: str) -> str:
        """A checkpoint, or a run's folder: its newest whole one."""
        path = checkpoint_path(user_path(value, key))
        if (path / "run.yaml").is_file():
            found = list_checkpoints(path / "checkpoints")
            good = next((one for one in reversed(found) if find_damage(one) is None), None)
            if good is None:
                raise UserError(f"{key}: {printable(value)}: this run has no whole checkpoint to start from")
            path = good
        elif not (path / MANIFEST).is_file():
            raise UserError(f"{key}: {printable(value)}: no checkpoint; name a run's folder or one of its checkpoints")
        files = sorted(file for file in path.iterdir() if file.is_file())
        remote = self._add_folder(path, files, below=path.name)
        self.notes.append(f"{key}: {printable(path, 120)} travels: the run on the box starts from it")
        return remote

    def _whole_folder(self, folder: Path, key: str) -> str:
        files = sorted(
            file
            for file in folder.rglob("*")
            if file.is_file() and not any(part[0] == "." for part in file.relative_to(folder).parts)
        )
        if any(file.suffix == ".safetensors" for file in files):
            other = [file for file in files if any(file.match(pattern) for pattern in _OTHER_WEIGHTS)]
            files = [file for file in files if file not in other]
            if other:
                names = ", ".join(file.name for file in other[:3]) + (" …" if len(other) > 3 else "")
                self.notes.append(f"{key}: {printable(folder)}: not sent, as it has safetensors: {names}")
        if not files:
            raise UserError(f"{key}: {printable(folder, 120)}: an empty folder")
        remote = self._add_folder(folder, files)
        self._note_outside(str(folder), folder, key, remote)
        return remote

    def _file_in_folder(self, file: Path, key: str) -> str:
        """A GGUF file keeps its name: a resumed run knows its base by name and size."""
        remote = f"{self._add_folder(file.parent, [file], stem=file.stem)}/{file.name}"
        self._note_outside(str(file), file, key, remote)
        return remote

    def _add_folder(self, folder: Path, files: Sequence[Path], below: str = "", stem: str = "") -> str:
        name, names = folder_name(folder, files, self._digests, stem)
        remote = f"{self._folder}/{name}" + (f"/{below}" if below else "")
        for file, inside in zip(files, names, strict=True):
            self._add(file, f"{remote}/{inside}")
        return remote

    def _add(self, file: Path, remote: str) -> None:
        real = file.resolve()
        if file.is_symlink() and not real.is_relative_to(self._project):
            self._links.append((file, real))
        self._items[remote] = real

    def _existing(self, value: str, key: str, hub: bool) -> Path | None:
        """The path; None for a name on the hub."""
        path = user_path(value, key)
        if path.exists():
            return path
        self._refuse_windows_path(value, key)
        name = value.partition("@")[0]
        looks_like_path = value[:1] in (".", "/", "~") or "\\" in value or name.count("/") > 1
        if not hub or looks_like_path or not is_hub_name(name):
            raise UserError(f"{key}: {printable(value)}: no such file or folder here; check the spelling")
        self.from_hub.append(key)
        self.notes.append(f"{key}: {printable(value)}: the box downloads it from the hub")
        return None

    def _refuse_windows_path(self, value: str, key: str) -> None:
        if os.name == "nt" or not _WINDOWS.match(value):
            return
        drive = value[:1].lower()
        here = f"; in WSL: /mnt/{drive}/{value[3:]}".replace("\\", "/") if value[1:2] == ":" else ""
        raise UserError(f"{key}: {printable(value)}: a Windows path, which does not exist on this machine{here}")

    def _note_outside(self, written: str, path: Path, key: str, remote: str) -> None:
        inside = path.resolve().is_relative_to(self._project)
        if not inside:
            self.notes.append(f"{key}: {printable(written, 120)} is outside this project; on the box it is {remote}")
        elif Path(written).is_absolute() or written.startswith("~"):
            self.notes.append(f"{key}: {printable(written, 120)} is a path of this machine; on the box it is {remote}")

    def note_links(self) -> None:
        """One note for all links that lead out of the project."""
        if self._links:
            link, target = self._links[0]
            more = f" (and {len(self._links) - 1} more)" if len(self._links) > 1 else ""
            self.notes.append(
                f"{printable(link, 100)} is a link to {printable(target, 100)}, outside this project{more}: "
                "what it links to travels"
            )
