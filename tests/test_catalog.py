"""The catalogue: every figure has a source, names are found however they are spelled, users add their own rows."""

import re
from datetime import date
from pathlib import Path

import pytest

from sojourn.catalog import staleness
from sojourn.catalog.gpus import find_gpu, gpus, split_count
from sojourn.catalog.models import find_model
from sojourn.catalog.platforms import platforms
from sojourn.catalog.prices import currencies, prices, prices_of
from sojourn.catalog.tables import user_file
from sojourn.errors import UserError

MONTH = re.compile(r"20\d\d-(0[1-9]|1[0-2])(-[0-3]\d)?$")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return tmp_path / "catalog.toml"


@pytest.mark.parametrize("row", gpus(), ids=lambda row: row.name)
def test_every_gpu_has_a_source_a_date_and_sane_figures(row):
    assert row.source and MONTH.match(row.date)
    assert 8 <= row.memory_gib <= (512 if row.unified else 288)
    assert 50 <= row.bandwidth_gbs <= 10_000
    assert row.plan_gib < row.memory_gib and row.plan_gib > 0.7 * row.memory_gib
    if row.unified or row.refused:
        assert row.capability is None
        return
    assert row.usable_gib is not None
    if row.not_run:  # of another maker
        assert row.capability is None and row.bf16_tflops and row.fp32_tflops
        return
    assert row.fp16_tflops is not None and 10 <= row.fp16_tflops <= 3000
    assert row.capability is not None and (6, 0) <= row.capability <= (12, 1)
    assert row.usable_gib <= 0.995 * row.memory_gib, "CUDA always keeps something"
    assert row.fp32_tflops is not None and 5 <= row.fp32_tflops <= 200
    assert row.fp32_tflops < row.fp16_tflops
    assert row.pcie_gen in (3, 4, 5, 6) and row.pcie_lanes in (8, 16)
    # Operations for each byte read: so it is on every card there is.
    assert 20 <= 1000 * row.fp16_tflops / row.bandwidth_gbs <= 500


def test_rates_are_dense_by_what_the_tensor_cores_of_each_generation_do_in_a_clock():
    """A multiple of the ordinary cores' rate, which nobody halves or doubles in a table."""
    times = {(6, 0): 2, (7, 0): 8, (7, 5): 8, (8, 0): 16, (8, 6): 4, (8, 9): 4, (9, 0): 14.8, (12, 0): 4}
    times |= {(10, 0): 30, (10, 3): 30}
    slowed = {(7, 5): 4, (8, 6): 2, (8, 9): 2, (12, 0): 2}  # GeForce: 32-bit sums at half the speed
    cut = ("A10G", "L20", "L40")  # sold with the tensor cores of a GeForce
    for row in gpus():
        if row.capability is None or row.name == "H20":  # its tensor cores were cut down, its ordinary ones were not
            continue
        professional = row.name.startswith(("RTX A", "RTX PRO")) or row.name.endswith("Ada")
        geforce = row.name in cut or (row.name.startswith(("RTX ", "vGPU")) and not professional)
        expected = (slowed if geforce else times)[row.capability]
        near = 0.07 if row.capability >= (10, 0) or row.name.endswith("NVL") else 0.02  # vendors round these
        assert row.fp16_tflops / row.fp32_tflops == pytest.approx(expected, rel=near), row.name


def test_links_between_cards_are_those_of_the_board():
    for row in gpus():
        assert (row.nvlink_gbs is None) == (row.nvlink_peers is None), row.name
        if row.nvlink_gbs:
            assert row.nvlink_peers in (2, 4, 8, 72) and 100 <= row.nvlink_gbs <= 1800, row.name
            assert row.nvlink_peers == 2 or not row.name.startswith("RTX"), row.name
            assert row.nvlink_gbs / 2 > row.pcie_gbs, row.name
        if row.name.endswith("PCIe"):
            assert row.nvlink_peers != 8, row.name
    assert find_gpu("4090").nvlink_gbs is None and find_gpu("3090").nvlink_gbs == 112.5
    assert find_gpu("A100 80GB").nvlink_gbs == 600 and find_gpu("A800").nvlink_gbs == find_gpu("H800").nvlink_gbs == 400
    assert find_gpu("4090").pcie_gbs == pytest.approx(31.5, abs=0.1) and find_gpu("4060 Ti").pcie_gbs == pytest.approx(
        15.75, abs=0.1
    )


def test_bf16_and_fp8_figures_stand_only_where_the_hardware_has_them():
    for row in gpus():
        if row.capability is None:
            continue
        assert (row.bf16_tflops is not None) == (row.capability >= (8, 0)), row.name
        assert (row.fp8_tflops is not None) == (row.capability >= (8, 9)), row.name
        assert (row.tf32_tflops is not None) == (row.capability >= (8, 0)), row.name
        if row.bf16_tflops:
            assert row.bf16_tflops == row.fp16_tflops, row.name
            assert row.tf32_tflops == pytest.approx(row.bf16_tflops / 2, rel=0.02), row.name
        if row.fp8_tflops and row.bf16_tflops:
            assert row.fp8_tflops == pytest.approx(2 * row.bf16_tflops, rel=0.02), row.name


def test_the_cards_people_rent_are_all_there():
    said = "T4 P100 V100-16GB V100-32GB 2080Ti 3060 3080 3090 4060Ti 4070 4080 4090 4090D 5090 A10 A5000 A6000 A40 L4"
    said += " L40S A100-40GB A100-80GB A800 H20 H100 H800 H200 B200 M1 M1-Max M2-Pro M3-Max M4 M4-Max M1-Ultra M5"
    said += " V100-PCIE-16GB V100-PCIE-32GB A100-PCIE-40GB A100-PCIE-80GB A800-PCIE-80GB H100-PCIe H800-PCIe"
    said += " A10G RTX-PRO-6000 6000-Ada 5080 5070Ti 3090Ti 3080Ti 4080-SUPER 4090-48GB 2080Ti-22GB vGPU-32GB vGPU-48GB"
    said += " L20 L40 A30 H100-NVL H200-NVL B300 GB200 MI300X Ascend-910B"
    assert len({find_gpu(name).name for name in said.split()}) == len(said.split())


def test_a_card_that_was_never_run_or_cannot_be_used_says_why():
    assert "ROCm" in find_gpu("MI300X").not_run and "torch_npu" in find_gpu("昇腾910B").refused


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("4090", "RTX 4090"),
        ("rtx 4090", "RTX 4090"),
        ("RTX4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 D", "RTX 4090D"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB PCIe"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("a100-80g", "A100 80GB"),
        ("A100-SXM-80G", "A100 80GB"),
        ("NVIDIA H800 PCIe", "H800 PCIe"),
        ("b200 192gb", "B200"),
        ("a100-40", "A100 40GB"),
        ("4060 Ti 16", "RTX 4060 Ti 16GB"),
        ("a100_80g", "A100 80GB"),
        ("Tesla T4", "T4"),
        ("Tesla P100-PCIE-16GB", "P100 16GB"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("Tesla V100-PCIE-32GB", "V100 32GB PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("Apple M3 Max", "Apple M3 Max"),
        ("RTX４０９０", "RTX 4090"),
        ("pro6000", "RTX PRO 6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA vGPU-32GB", "vGPU-32GB"),
        ("2080 Ti", "RTX 2080 Ti"),
        ("2080ti 22g", "RTX 2080 Ti 22GB"),
    ],
)
def test_a_gpu_is_found_however_people_and_drivers_spell_it(spelled, name):
    assert find_gpu(spelled).name == name


def test_an_unknown_gpu_is_an_error_that_guesses():
    with pytest.raises(UserError, match=r"no GPU called '6000'.*did you mean.*RTX PRO 6000"):
        find_gpu("6000")
    with pytest.raises(UserError, match=r"no GPU called 'RTX 4099'.*did you mean.*RTX 4090"):
        find_gpu("RTX 4099")


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("2xT4", "T4", 2), ("T4x2", "T4", 2), ("2 × RTX 4090", "RTX 4090", 2), ("4x4090", "4090", 4),
        ("A100 80GB x8", "A100 80GB", 8), ("T4:2", "T4", 2), ("８xH100", "H100", 8),
        ("RTX PRO 6000", "RTX PRO 6000", None),
        ("4090", "4090", None), ("x2", "x2", None),
    ],
)  # fmt: skip
def test_a_number_of_cards_may_stand_before_or_behind_the_name(text, name, count):
    assert split_count(text) == (name, count)


@pytest.mark.parametrize(("typed", "near"), [("RTX PRO 7000", "RTX PRO 6000"), ("M7 Pro", "Apple M")])
def test_an_unknown_gpu_gets_near_names_of_its_own_kind(typed, near):
    with pytest.raises(UserError, match=near) as error:
        find_gpu(typed)
    assert ("Apple" in str(error.value)) == ("Apple" in near)


@pytest.mark.parametrize("name", ["RTX 4090 Laptop GPU", "RTX 6000"])
def test_a_card_with_a_similar_name_is_not_taken_for_another(name):
    with pytest.raises(UserError, match="no GPU called"):
        find_gpu(name)


def test_a_name_sold_in_two_sizes_asks_which_unless_the_driver_told_the_memory():
    with pytest.raises(UserError, match="'A100 40GB' or 'A100 80GB'"):
        find_gpu("A100")
    assert find_gpu("NVIDIA A100", memory_gib=39.4).name == "A100 40GB"
    with pytest.raises(UserError, match="no 'RTX 4060 Ti' of that memory size"):
        find_gpu("RTX 4060 Ti", memory_gib=7.7)


def test_a_mac_is_its_chip_with_the_memory_that_it_has():
    assert find_gpu("M3 Max 64GB").memory_gib == 64 and find_gpu("Apple M3 Max", memory_gib=36).plan_gib == 27
    with pytest.raises(UserError, match="memory size"):
        find_gpu("M1 64GB")


def test_every_platform_has_its_facts_and_a_way_to_be_recognised():
    rows = platforms()
    only_priced = {"colab-paid", "modal", "aws", "gcp", "azure", "aliyun", "tencent", "huawei"}
    assert {row.name for row in rows if not (row.env or row.folders)} == {"generic", *only_priced}
    for row in rows:
        assert row.source and MONTH.match(row.date) and row.limits and row.wiped and row.stop and row.reach, row.name
        assert set(row.grade) <= set("ABC/")
        assert row.currency in (None, *currencies()), row.name
        assert {disk.path for disk in row.disks} <= {*row.persistent, *row.volatile, *row.read_only}, row.name
        for disk in row.disks:
            assert disk.path in row.volatile or disk.survives in ("stop", "release"), (row.name, disk.path)
        if row.name != "generic" and row.name not in only_priced:
            assert row.home and row.persistent, row.name


def test_when_sessions_end_and_what_a_machine_without_its_gpu_costs():
    place = {row.name: row for row in platforms()}
    assert (place["kaggle"].session_hours, place["kaggle"].weekly_gpu_hours) == (12, 30)
    assert (place["colab"].session_hours, place["paperspace"].session_hours) == (12, 6)
    assert place["autodl"].session_hours is place["autodl"].weekly_gpu_hours is None
    assert (place["autodl"].no_gpu_per_hour, place["autodl"].currency) == (0.1, "CNY")
    assert (place["autodl"].released_after_days, place["gpushare"].released_after_days) == (15, 10)
    net = next(disk for disk in place["autodl"].disks if disk.path == "/root/autodl-fs")
    assert (net.free_gb, net.inodes, net.survives) == (20, 200_000, "release")
    assert next(disk for disk in place["gpushare"].disks if disk.path == "/hy-tmp").kept_hours == 24


def test_a_generic_machine_has_no_stop_command():
    assert {row.name: row.stop_command for row in platforms()}["generic"] is None


def test_every_price_names_a_known_gpu_and_platform_and_its_month():
    places, cards = {row.name for row in platforms()}, {row.name for row in gpus()}
    for row in prices():
        assert row.platform in places and row.gpu in cards
        assert row.source and MONTH.match(row.month) and 0 <= row.cny_per_hour < 150 * row.count
        assert row.cny_per_hour == pytest.approx(row.per_hour * currencies()[row.currency].cny)
        assert row.currency == ({place.name: place for place in platforms()}[row.platform].currency or "CNY")


def test_a_card_on_another_board_has_the_price_of_its_sister():
    assert {"autodl", "matpool"} < {p.platform for p in prices_of(find_gpu("A100-PCIE-40GB"))}
    found = {p.platform: p for p in prices_of(find_gpu("A100 80GB PCIe"))}
    assert found["autodl"].cny_per_hour == 5.98 and found["autodl"].gpu == "A100 80GB"
    assert found["runpod"].gpu == "A100 80GB PCIe"
    assert prices_of(find_gpu("RTX 4070")) == ()


def test_what_is_older_than_90_days_is_stale(monkeypatch):
    monkeypatch.setattr(staleness, "today", lambda: date(2026, 11, 18))
    assert [staleness.age_in_days(when) for when in ("2026-11-18", "2026-08-20", "2026-10", "2026-11-15 10:00")] == [
        0,
        90,
        18,
        3,
    ]
    assert not staleness.is_stale("2026-08-20") and staleness.is_stale("2026-08-19") and not staleness.is_stale("?")
    assert staleness.with_age("2026-05-08") == "2026-05-08, stale: 194 days old"
    assert staleness.age_in_days("2026-13") is staleness.age_in_days("2026-02-30") is None


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
    assert find_gpu("4090 48gb", user=own).memory_gib == 48
    assert find_gpu("4090 24gb", user=own).name == "RTX 4090"
    paperspace = next(row for row in platforms(own) if row.name == "paperspace")
    assert paperspace.session_hours == 8 and paperspace.home == ("/storage", "/notebooks")


def test_tables_may_be_called_by_the_word_for_many(own):
    own.write_text('[gpus."Mine"]\nmemory_gib = 24\nbandwidth_gbs = 900\n[prices.autodl."4090"]\ncny_per_hour = 1\n')
    assert find_gpu("mine", user=own).plan_gib == pytest.approx(0.97 * 24)
    assert [p.cny_per_hour for p in prices(own) if (p.platform, p.gpu) == ("autodl", "RTX 4090")] == [1]


def test_another_memory_size_of_a_card_does_not_keep_what_the_old_size_left_usable(own):
    own.write_text('[gpu."RTX 4090"]\nmemory_gib = 48\n')
    assert find_gpu("4090", user=own).plan_gib == pytest.approx(0.97 * 48)


def test_a_price_in_dollars_is_compared_in_the_catalogues_unit(own):
    own.write_text(
        '[platform.mine]\n[price.mine."H100"]\nper_hour = 2.0\ncurrency = "USD"\n'
        '[price.autodl."RTX 4090"]\nper_hour = 0.3\ncurrency = "USD"\n[currency.USD]\ncny = 7\n'
    )
    found = {(p.platform, p.gpu): p for p in prices(own)}
    assert found["mine", "H100"].cny_per_hour == 14 and found["mine", "H100"].per_hour == 2
    assert found["autodl", "RTX 4090"].cny_per_hour == pytest.approx(2.1)
    assert currencies()["USD"].source and MONTH.match(currencies()["USD"].date)


def test_rows_in_sojourns_home_are_read_before_those_in_the_configuration_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SOJOURN_HOME", str(tmp_path))
    assert user_file().parent != tmp_path
    (tmp_path / "catalog.toml").write_text('[gpu."Mine"]\nmemory_gib = 24\nbandwidth_gbs = 900\n')
    assert user_file() == tmp_path / "catalog.toml" and find_gpu("mine").memory_gib == 24


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[gpu", "not valid TOML"),
        ("[gpux.x]\nmemory_gib = 1", r"unknown table \[gpux\]; did you mean gpu"),
        ("[gpu.a]\n[gpus.b]", "are the same table"),
        ('[gpu."RTX 4090"]\nmemory_gib = nan', "`memory_gib` is nan: it must be a number"),
        ('[gpu."RTX 4090"]\nmemory_gib = 0', "`memory_gib` is 0: no GPU has that"),
        (f'[gpu."RTX 4090"]\nbandwidth_gbs = 1{"0" * 400}', "`bandwidth_gbs` is 1000.*it must be a number"),
        ('[gpu."RTX 4090"]\nusable_gib = 25', "`usable_gib` is 25: it must be between"),
        ('[gpu."RTX 4090"]\npcie_gen = 9', "`pcie_gen` is 9: known are 3, 4"),
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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[price.autodl."RTX 4091"]\ncny_per_hour = 1', r'price.autodl."RTX 4091": no GPU called.*RTX 4090'),
        ('[price.autodI."RTX 4090"]\ncny_per_hour = 1', r"no platform called 'autodI'; did you mean autodl"),
        ('[price.xyz."RTX 4090"]\ncny_per_hour = 1', r"no platform called 'xyz'; add \[platform.xyz\]"),
        ('[price.autodl."A40"]\nper_hour = 1\ncurrency = "XYZ"', r"'XYZ', which has no rate; add \[currency.XYZ\]"),
        ('[price.autodl."A40"]\nper_hour = 1\ncny_per_hour = 7', "are both there"),
        ('[price.autodl."A40"]\nnote = "x"', "`cny_per_hour` is missing"),
        ('[price.autodl."A40"]\ncny_per_hour = 1\ncurrency = "USD"', "`currency` goes with `per_hour`"),
    ],
)
def test_a_price_that_cannot_be_used_says_why(own, text, says):
    own.write_text(text)
    with pytest.raises(UserError, match=says) as error:
        prices(own)
    assert str(error.value).startswith(str(own)) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("disks", "says"),
    [
        ('"/data"', "`disks` is '/data': it must be a list of tables"),
        ('["/data"]', r"`disks\[0\]` is '/data': it must be a table"),
        ('[{ path = "/data" }]', r"`disks\[0\]`: `survives` is missing"),
        (
            '[{ path = "/data", survives = "fire" }]',
            r"`disks\[0\]`: `survives` is 'fire': it must be session, stop or release",
        ),
    ],
)
def test_a_mistake_in_a_users_platform_names_the_disk(own, disks, says):
    own.write_text(f"[platform.mine]\ndisks = {disks}\n")
    with pytest.raises(UserError, match=says) as error:
        platforms(own)
    assert str(error.value).startswith(f"{own}: platform.mine")


def test_the_rows_that_the_documentation_shows_can_be_typed(own):
    text = (Path(__file__).parent.parent / "docs/catalogue.md").read_text(encoding="utf-8")
    own.write_text(text.split("```toml\n")[1].split("```")[0], encoding="utf-8")
    assert find_gpu("4090 48g", user=own).bf16_tflops == 165.2 and find_gpu("4090 24g", user=own).name == "RTX 4090"
    found = {(p.platform, p.gpu): p.cny_per_hour for p in prices(own)}
    assert found["autodl", "RTX 4090"] == 1.98 and found["campus", "RTX 4090 48GB"] == pytest.approx(
        0.35 * currencies()["USD"].cny
    )
    assert find_model("my-7b", own).kv_heads == 8
    assert find_gpu("4090", user=own).memory_gib == 24 and find_gpu("4090", memory_gib=47.4, user=own).memory_gib == 48
