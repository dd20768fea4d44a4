"""The catalogue: every figure has a source, names are found however they are spelled, users add their own rows."""

import re
from pathlib import Path

import pytest

from sojourn.catalog import gpu, gpus, platforms, prices
from sojourn.errors import UserError

MONTH = re.compile(r"20\d\d-(0[1-9]|1[0-2])$")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return tmp_path / "catalog.toml"


@pytest.mark.parametrize("row", gpus(), ids=lambda row: row.name)
def test_every_gpu_has_a_source_a_date_and_sane_figures(row):
    assert row.source and MONTH.match(row.date)
    assert 8 <= row.memory_gib <= 256
    assert 50 <= row.bandwidth_gbs <= 10_000
    assert row.plan_gib < row.memory_gib and row.plan_gib > 0.7 * row.memory_gib
    if row.unified:
        assert row.capability is None
        return
    assert row.usable_gib is not None
    assert row.fp16_tflops is not None and 10 <= row.fp16_tflops <= 3000
    assert row.capability is not None and (6, 0) <= row.capability <= (12, 1)


def test_bf16_and_fp8_figures_stand_only_where_the_hardware_has_them():
    for row in gpus():
        if row.capability is None:
            continue
        assert (row.bf16_tflops is not None) == (row.capability >= (8, 0)), row.name
        assert (row.fp8_tflops is not None) == (row.capability >= (8, 9)), row.name
        if row.fp8_tflops and row.bf16_tflops:
            assert row.fp8_tflops == pytest.approx(2 * row.bf16_tflops, rel=0.02), row.name


def test_the_cards_people_rent_are_all_there():
    said = "T4 P100 V100-16GB V100-32GB 2080Ti 3060 3080 3090 4060Ti 4070 4080 4090 4090D 5090 A10 A5000 A6000 A40 L4"
    said += " L40S A100-40GB A100-80GB A800 H20 H100 H800 H200 B200 M1 M1-Max M2-Pro M3-Max M4 M4-Max"
    assert len({gpu(name).name for name in said.split()}) == len(said.split())


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("4090", "RTX 4090"),
        ("rtx 4090", "RTX 4090"),
        ("RTX4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 D", "RTX 4090D"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB"),
        ("a100-40", "A100 40GB"),
        ("a100_80g", "A100 80GB"),
        ("Tesla T4", "T4"),
        ("Tesla P100-PCIE-16GB", "P100 16GB"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("Apple M3 Max", "Apple M3 Max"),
    ],
)
def test_a_gpu_is_found_however_people_and_drivers_spell_it(spelled, name):
    assert gpu(spelled).name == name


def test_an_unknown_gpu_is_an_error_that_guesses():
    with pytest.raises(UserError, match=r"no GPU called 'RTX 4099'.*did you mean.*RTX 4090"):
        gpu("RTX 4099")


@pytest.mark.parametrize("name", ["RTX 4090 Laptop GPU", "RTX 6000 Ada"])
def test_a_card_with_a_similar_name_is_not_taken_for_another(name):
    with pytest.raises(UserError, match="no GPU called"):
        gpu(name)


def test_a_name_sold_in_two_sizes_asks_which_unless_the_driver_told_the_memory():
    with pytest.raises(UserError, match="'A100 40GB' or 'A100 80GB'"):
        gpu("A100")
    assert gpu("NVIDIA A100", memory_gib=39.4).name == "A100 40GB"
    with pytest.raises(UserError, match="no 'RTX 4060 Ti' of that memory size"):
        gpu("RTX 4060 Ti", memory_gib=7.7)


def test_every_platform_has_its_facts_and_a_way_to_be_recognised():
    rows = platforms()
    assert [row.name for row in rows if not (row.env or row.folders)] == ["generic"]
    for row in rows:
        assert row.source and MONTH.match(row.date) and row.limits and row.wiped and row.stop and row.reach, row.name
        assert set(row.grade) <= set("ABC/")
        if row.name != "generic":
            assert row.home and row.persistent, row.name


def test_a_generic_machine_has_no_stop_command():
    assert {row.name: row.stop_command for row in platforms()}["generic"] is None


def test_every_price_names_a_known_gpu_and_platform_and_its_month():
    places, cards = {row.name for row in platforms()}, {row.name for row in gpus()}
    for row in prices():
        assert row.platform in places and row.gpu in cards
        assert row.source and MONTH.match(row.month) and 0 <= row.cny_per_hour < 100


def test_a_users_price_wins_and_carries_the_users_file_as_its_source(own):
    own.write_text('[price.autodl."rtx 4090"]\ncny_per_hour = 1.5\n')
    mine = [row for row in prices(own) if row.platform == "autodl" and row.gpu == "RTX 4090"]
    assert [row.cny_per_hour for row in mine] == [1.5]
    assert mine[0].source == str(own) and MONTH.match(mine[0].month)
    assert len(prices(own)) == len(prices())


def test_a_user_adds_a_gpu_of_their_own_and_changes_a_platform(own):
    own.write_text(
        '[gpu."RTX 4090 48GB"]\nmemory_gib = 48\nbandwidth_gbs = 1008\nfp16_tflops = 165\ncapability = "8.9"\n'
        "[platform.paperspace]\nsession_hours = 8\n"
    )
    assert gpu("4090 48gb", user=own).memory_gib == 48
    assert gpu("4090 24gb", user=own).name == "RTX 4090"
    paperspace = next(row for row in platforms(own) if row.name == "paperspace")
    assert paperspace.session_hours == 8 and paperspace.home == ("/storage", "/notebooks")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[gpu", "not valid TOML"),
        ("[gpus.x]\nmemory_gib = 1", r"unknown table \[gpus\]; did you mean gpu"),
        ('[gpu."RTX 4090"]\nmemory_gb = 24', "unknown key `memory_gb`; did you mean memory_gib"),
        ('[gpu."RTX 4090"]\nmemory_gib = "24"', "`memory_gib` is '24': it must be a number"),
        ('[gpu."RTX 4090"]\nmemory_gib = -1', "`memory_gib` is -1: it cannot be negative"),
        ('[gpu."RTX 4090"]\ncapability = 8.9', 'it must be a version in quotes, like "8.9"'),
        ('[gpu."Mine"]\nmemory_gib = 24', "`bandwidth_gbs` is missing"),
        ("gpu = 3", "gpu must be a table"),
        ("[gpu]\nx = 3", "gpu.x must be a table"),
    ],
)
def test_a_mistake_in_the_users_catalogue_names_the_file_and_the_key(own, text, says):
    own.write_text(text)
    with pytest.raises(UserError, match=says) as error:
        gpus(own)
    assert str(error.value).startswith(str(own))


def test_a_mistake_in_a_users_price_names_the_row(own):
    own.write_text('[price.autodl]\n"RTX 4090" = 2.0\n')
    with pytest.raises(UserError, match=r"price.autodl.RTX 4090 must be a table"):
        prices(own)
