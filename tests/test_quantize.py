"""`sojourn quantize`: what this machine cannot do is said at once."""

from __future__ import annotations

import torch

from conftest import called
from tiny import Tiny


def test_what_cannot_run_here_is_said_before_anything_is_loaded(tiny: Tiny) -> None:
    wrong = called("quantize", str(tiny.base), "--to", "int9")
    assert wrong.returncode == 2 and "did you mean" in wrong.stderr and wrong.stderr.count("\n") == 1
    for kind in ("fp8", "int4"):
        if torch.cuda.is_available():
            continue
        done = called("quantize", "no-such-model", "--to", kind)
        assert done.returncode == 2 and "needs a GPU of compute capability" in done.stderr
        assert "works here: " in done.stderr and "nf4" in done.stderr and done.stderr.count("\n") == 1
