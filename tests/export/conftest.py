"""One trained LoRA for all tests of a real model."""

from __future__ import annotations

import pytest

from real_lora import RealLora, train_lora


@pytest.fixture(scope="session")
def lora(tmp_path_factory: pytest.TempPathFactory) -> RealLora:
    return train_lora(tmp_path_factory.mktemp("home"))
