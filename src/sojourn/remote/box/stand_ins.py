"""Empty wheels with the names and versions of what an image has: a resolver that reads them leaves those as they are.

The laptop uses it for a box without internet, the box for uv, which does not see an image's packages from a venv.
"""

from __future__ import annotations

import os
import re
import zipfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9.]+)?")


def write_stand_ins(folder: str, packages: Mapping[str, str]) -> list[str]:
    """A pin for each, like "torch==2.6.0+cu124"; packages with a version that no resolver reads are left out."""
    os.makedirs(folder, exist_ok=True)
    pins = []
    for name, version in sorted(packages.items()):
        if not _VERSION.fullmatch(version):
            continue
        stem = f"{name.replace('-', '_')}-{version}"
        with zipfile.ZipFile(os.path.join(folder, stem + "-py3-none-any.whl"), "w") as archive:
            info = f"{stem}.dist-info"
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        pins.append(f"{name}=={version}")
    return pins
