"""Killed at random moments and at chosen disk calls, a run loses nothing; `make test-kill` does the same at length."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from kill.forge import Forge
from kill.plans import harry, strike
from kill.scene import Journey, Scene, needs_fork, set_scene

pytestmark = needs_fork


@pytest.fixture(scope="module")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    opened = Forge(tmp_path_factory.mktemp("forge"))
    yield opened
    opened.close()


@pytest.fixture(scope="module", params=["pretrain", "lora"])
def scene(request: pytest.FixtureRequest, forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return set_scene(forge, tmp_path_factory.mktemp("kill") / request.param, request.param)


def test_random_kills_change_neither_the_weights_nor_what_was_read(scene):
    chance, kills = Random(scene.method), 0
    while kills < 4:
        kills += harry(Journey(scene, f"random-{kills}"), chance, most=5)


def test_a_kill_during_a_save_keeps_the_last_good_checkpoint(scene):
    writing = "write checkpoints/.stage-PID-{0}/model.safetensors 2 of {0}"
    placing = "rename checkpoints/.stage-PID-{0} 1 of {0}"
    removing = "unlink checkpoints/step-OLD/model.safetensors 1 of {0}"
    chain = [(writing, "half"), (placing, "before"), (placing, "after"), (removing, "before")]
    saves = ("step-00000004", "step-00000006", "step-00000008", "step-00000012")
    strike(Journey(scene, "save"), [(name.format(at), how) for at, (name, how) in zip(saves, chain, strict=True)])


def test_a_kill_while_a_model_is_put_in_place_leaves_none_or_all_of_it(scene):
    chain = [("rename best 1 of best", "after"), ("rename .stage-PID-final 1 of final", "before")]
    strike(Journey(scene, "final"), chain)
