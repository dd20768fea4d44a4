"""`sojourn export --to onnx`: written, replayed in onnxruntime by the parity gate, refused where it differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conftest import called
from sojourn.export.onnx import stored_weights
from sojourn.storage.files import read_json_object


def test_the_verb_writes_it_replays_it_and_refuses_a_swapped_tensor(base: Path, tmp_path: Path) -> None:
    """The whole command, with the parity gate in onnxruntime."""
    done = called("export", str(base), "--to", "onnx", "--out", str(tmp_path / "good"))
    assert done.returncode == 0, done.stderr
    assert read_json_object(tmp_path / "good" / "sojourn_export.json")["gate"]
    real = stored_weights._plain_rows

    def swapped(source: Any, name: str, *rest: Any) -> Any:
        return real(source, name.replace("k_proj", "v_proj"), *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_weights, "_plain_rows", swapped)
        refused = called("export", str(base), "--to", "onnx", "--out", str(tmp_path / "bad"))
    assert refused.returncode == 1, refused.stderr
    assert not (tmp_path / "bad").exists()
