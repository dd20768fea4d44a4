"""`sojourn merge` killed or interrupted at 50 random moments, sometimes again and again: there is never half an export,
nothing that was complete is written twice, and the result has the bytes of one that nobody touched."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from fork_server import ForkServer, needs_fork
from sojourn.export.stage import MANIFEST
from sojourn.storage.files import read_json_object, sha256
from test_merge import ATTENTION, add_adapter, make_model

pytestmark = needs_fork

MOMENTS = 50
# Every tensor is a shard, every part a sync, and reading takes a while, so that moments fall everywhere.
SLOW = """
import time
from sojourn.export import hf, ranges
hf.SHARD_BYTES, ranges._SYNC_BYTES, real = 5_000, 1, hf._piece
def piece(*given):
    time.sleep(0.01)
    return real(*given)
hf._piece = piece
"""
DIRECT = """
from sojourn.export import direct_file
direct_file.LEAST_BYTES, direct_file._BUFFER_BYTES = 0, 4096
"""


@dataclass(frozen=True)
class Undisturbed:
    adapter: Path
    files: dict[str, str]
    seconds: float


def contents(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Undisturbed:
    folder = tmp_path_factory.mktemp("kills")
    base = make_model(folder / "base", num_hidden_layers=8)
    _add_tokenizer(base)
    add_adapter(base, folder / "adapter", target_modules=[*ATTENTION, "up_proj"], use_dora=True)
    began = time.monotonic()
    done = fork_server.run("merge", str(folder / "adapter"), "--out", str(folder / "out"), preamble=SLOW)
    assert done.returncode == 0, done.stderr
    files = contents(folder / "out")
    assert sum(name.endswith(".safetensors") for name in files) > 50
    return Undisturbed(folder / "adapter", files, time.monotonic() - began)


def _add_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [chr(number) for number in range(32, 127)]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{letter: number for number, letter in enumerate(letters, 3)}}
    special = {"unk_token": "<unk>", "eos_token": "</s>"}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = "{% for m in messages %}{{ m['content'] + '</s>' }}{% endfor %}"
    fast.save_pretrained(folder)


@pytest.mark.parametrize("seed", range(MOMENTS))
def test_an_export_interrupted_at_a_random_moment(
    seed: int, undisturbed: Undisturbed, fork_server: ForkServer, tmp_path: Path, record_property: Callable[..., None]
) -> None:
    random, target = Random(seed), tmp_path / "out"
    args = ("merge", str(undisturbed.adapter), "--out", str(target))
    number = signal.SIGKILL if seed % 2 else signal.SIGINT
    slow = SLOW + DIRECT * (seed % 4 > 1)
    complete: dict[str, tuple[str, int]] = {}
    for _ in range(random.randint(1, 3)):
        child = fork_server.start(*args, preamble=slow)
        time.sleep(random.uniform(0, 1.05 * undisturbed.seconds))
        ended = child.poll() is not None
        child.send_signal(number)
        code = child.wait()
        assert ended or code in (0, -signal.SIGKILL, 130, -signal.SIGINT), child.stderr
        if target.exists():
            assert contents(target) == undisturbed.files
            continue
        complete = _check_partial(tmp_path / ".partial-out", complete)
    record_property("files complete when it was interrupted", len(complete))
    done = fork_server.run(*args, preamble=slow)
    assert done.returncode == 0, done.stderr
    assert contents(target) == undisturbed.files
    times = {name: (target / name).stat().st_mtime_ns for name in complete if name != "README.md"}
    assert times == {name: stamp for name, (_, stamp) in complete.items() if name in times}, "written again"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _check_partial(partial: Path, before: dict[str, tuple[str, int]]) -> dict[str, tuple[str, int]]:
    """What is recorded as complete is; nothing that was complete before is missing now."""
    files = read_json_object(partial / MANIFEST).get("files", {})
    found = {name: (facts["sha256"], (partial / name).stat().st_mtime_ns) for name, facts in files.items()}
    for name, (digest, _) in found.items():
        assert digest in ("", sha256(partial / name))
    assert before.keys() - {"README.md"} <= found.keys()
    return found
