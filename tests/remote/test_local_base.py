"""A base model of the laptop travels to the box; its adapter, and its checkpoints, open at home."""

from __future__ import annotations

import shutil

from laptop import Laptop
from remote_box import RemoteBox, needs_box
from shared import Shared, write_chats

pytestmark = needs_box

LORA = ("method.kind=lora", "method.rank=4", "data.max_length=64", "train.global_batch=8", "train.steps=12",
        "save.every_steps=6", "log.tensorboard=off", "limits.session=off")  # fmt: skip


def test_an_adapter_of_a_local_base_opens_at_home(box: RemoteBox, laptop: Laptop, shared: Shared) -> None:
    shared.copy_base(laptop.folder / "base")
    base = shutil.copytree(laptop.folder / "base" / "llama", laptop.home / "my-base")
    write_chats(laptop.home / "my.jsonl")
    words = ("launch", f"model.base={base.name}", "--train_file", "my.jsonl", *LORA, "name=tuned", "--on", "box")
    refused = laptop.run(*words, code=2)
    assert "would train on the CPU" in refused.stderr
    laptop.run(*words, "train.device=cpu", "--prepare-there")
    assert laptop.run("generate", "tuned", "--prompt", "hello", "--max-tokens", "4").stdout
    laptop.run("pull", "tuned", "--what", "all")
    assert laptop.run("generate", "tuned", "--checkpoint", "6", "--prompt", "hello", "--max-tokens", "4").stdout
