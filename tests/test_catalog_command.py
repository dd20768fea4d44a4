"""`sojourn catalog`: what is listed and shown, rows that the user adds, and rows and rates that are refreshed."""

import json
import threading
from contextlib import contextmanager
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from conftest import called
from sojourn.catalog import refresh, staleness
from sojourn.catalog.gpus import find_gpu
from sojourn.catalog.prices import currencies, prices
from sojourn.catalog.tables import refreshed_file, user_file

RATES = """<Cube><Cube time='2026-11-17'>
<Cube currency='USD' rate='1.1500'/><Cube currency='GBP' rate='0.8800'/><Cube currency='CNY' rate='8.0500'/>
</Cube></Cube>"""


@pytest.fixture(autouse=True)
def own_files(home, monkeypatch):
    monkeypatch.setenv("SOJOURN_HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    monkeypatch.setattr(staleness, "today", lambda: date(2026, 11, 18))
    for name in ("SOJOURN_AUTODL_TOKEN", "RUNPOD_API_KEY", "VAST_API_KEY", "LAMBDA_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def served(text: str, status: int = 200):
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/file"
    finally:
        server.shutdown()
        server.server_close()


def price_of(platform, gpu):
    return next((price for price in prices() if (price.platform, price.gpu) == (platform, gpu)), None)


# --- list and show


def test_the_summary_counts_every_kind_and_what_is_stale():
    lines = called("catalog", "list").stdout.splitlines()
    assert [line.split()[0] for line in lines[:6]] == [
        "gpus",
        "platforms",
        "prices",
        "currencies",
        "models",
        "datasets",
    ]
    assert "stale" in lines[3] and "2026-05-08" in lines[3]


@pytest.mark.parametrize("kind", ["gpus", "platform", "prices", "currencies", "models", "datasets"])
def test_every_kind_can_be_listed(kind):
    shown = called("catalog", "list", kind)
    rows = json.loads(called("catalog", "list", kind, "--json").stdout)
    assert shown.returncode == 0 and len(shown.stdout.splitlines()) == len(rows)
    assert all(row["source"] and row.get("date", row.get("month")) for row in rows)


def test_stale_prices_and_rates_are_marked_and_can_be_listed_alone():
    text = called("catalog", "list", "prices").stdout
    line = next(line for line in text.splitlines() if line.startswith("modal") and "H100" in line)
    assert "3.9492 USD/h" in line and "2026-05-07, stale: 195 days old" in line
    assert all("stale: " in line for line in called("catalog", "list", "--stale").stdout.splitlines())


@pytest.mark.parametrize(
    ("word", "has"),
    [
        ("RTX４０９０", '[gpu."RTX 4090"]'), ("恒源云", "[platform.gpushare]"), ("usd", "stale: 194 days"),
        ("Qwen/Qwen2.5-7B-Instruct", '[model."qwen2.5-7b"]'), ("wikitext2", "[dataset."), ("aliyun", "no price known"),
    ],
)  # fmt: skip
def test_an_entry_is_shown_however_it_is_spelled(word, has):
    assert has in called("catalog", "show", word).stdout


def test_a_card_is_shown_with_its_prices_and_their_dates():
    text = called("catalog", "show", "4090").stdout
    assert "# autodl: 2.19 CNY an hour (AutoDL price page, 2026-08)" in text and "# runpod: 0.74 USD" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("list", "gpuss"), "did you mean gpu"), (("show", "qwen2.5-7x"), "did you mean"),
        (("show", "A100"), "more than one size"), (("add", "gpu"), ""), (("add", "gpu", "a", "b"), "one name"),
        (("add", "price", "autodl", "4090"), "such as"), (("add", "price", "autodl", "4090", "cheap"), "an amount"),
        (("add", "price", "nowhere", "4090", "¥1"), "no platform"),
        (("add", "gpu", "Mine", "memory_gib=8"), "is missing"),
        (("add", "gpu", "Mine", "memory_gb=8"), "unknown key"), (("add", "model", "m", "hidden=x"), "hidden"),
        (("refresh", "--from", "nowhere.toml"), "cannot be read"), (("refresh", "--from", "/proc"), "cannot be read"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_one_line(words, says):
    said = called("catalog", *words)
    assert said.returncode == 2 and says in said.stderr and len(said.stderr.splitlines()) == 1
    assert not user_file().is_file()


# --- add


def test_a_row_is_added_then_changed_and_the_rest_of_the_file_stays(home):
    (home / "catalog.toml").write_text('# mine\n[gpus."Mine"]\nmemory_gib = 24\nbandwidth_gbs = 900\n')
    assert called("catalog", "add", "price", "AutoDL", "4090", "¥1.98").returncode == 0
    assert price_of("autodl", "RTX 4090").per_hour == 1.98
    said = called("catalog", "add", "price", "autodl", "RTX 4090", "$0.30")
    found = price_of("autodl", "RTX 4090")
    assert "changed" in said.stdout and (found.per_hour, found.currency) == (0.3, "USD")
    assert called("catalog", "add", "gpu", "mine", "memory_gib=48").returncode == 0
    text = (home / "catalog.toml").read_text()
    assert text.startswith("# mine\n") and text.count("[") == 2 and find_gpu("mine").memory_gib == 48
    assert find_gpu("mine").bandwidth_gbs == 900


def test_a_wrong_row_leaves_the_file_as_it_was(home):
    (home / "catalog.toml").write_text('[gpu."Mine"]\nmemory_gib = 24\nbandwidth_gbs = 900\n')
    before = (home / "catalog.toml").read_text()
    said = called("catalog", "add", "gpu", "Mine", "memory_gib=-1")
    assert said.returncode == 2 and str(home / "catalog.toml") in said.stderr
    assert (home / "catalog.toml").read_text() == before and list(home.glob(".catalog*")) == []


# --- refresh

ROWS = """
[price.autodl."RTX 4090"]
cny_per_hour = 2.05
source = "AutoDL price page"
month = "2026-11-10"

[price.matpool."A100 40GB"]
cny_per_hour = 9.9
source = "matpool price page"
month = "2020-01"

[gpus."Card of tomorrow"]
memory_gib = 64
bandwidth_gbs = 4000
source = "its maker"
date = "2026-11"
"""


@pytest.mark.parametrize("by_url", [False, True])
def test_newer_rows_are_taken_from_a_file_or_a_url_and_older_ones_are_not(home, by_url):
    (home / "new.toml").write_text(ROWS)
    with served(ROWS) as url:
        said = called("catalog", "refresh", "--from", url if by_url else str(home / "new.toml"))
    assert said.returncode == 0 and "1 new, 1 changed, 1 older than here" in said.stdout
    assert (price_of("autodl", "RTX 4090").per_hour, price_of("autodl", "RTX 4090").month) == (2.05, "2026-11-10")
    assert price_of("matpool", "A100 40GB").per_hour == 2.8 and find_gpu("card of tomorrow").memory_gib == 64
    again = called("catalog", "refresh", "--from", str(home / "new.toml"), "--json")
    assert json.loads(again.stdout)["changed"] == []


def test_the_users_own_row_counts_more_than_a_refreshed_one(home):
    (home / "new.toml").write_text(ROWS)
    assert called("catalog", "refresh", "--from", str(home / "new.toml")).returncode == 0
    assert called("catalog", "add", "price", "autodl", "4090", "¥1.5").returncode == 0
    assert price_of("autodl", "RTX 4090").per_hour == 1.5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[price.autodl."RTX 4090"]\ncny_per_hour = 2\n', "needs `source` and `month`"),
        ('[gpu."X"]\nmemory_gib = 8\nsource = "x"\ndate = "2026-11"\n', "`bandwidth_gbs` is missing"),
        ("not toml [", "not valid TOML"), ("", "no rows"), ("[unknown.x]\n", "unknown table"),
        ('[price.nowhere."RTX 4090"]\ncny_per_hour = 2\nsource = "x"\nmonth = "2026-11"\n', "no platform called"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_changes_nothing(home, text, says):
    (home / "new.toml").write_text(text)
    said = called("catalog", "refresh", "--from", str(home / "new.toml"))
    assert said.returncode == 2 and says in said.stderr and len(said.stderr.splitlines()) == 1
    assert not refreshed_file().exists()


def test_exchange_rates_come_from_the_central_bank(monkeypatch):
    with served(RATES) as url:
        monkeypatch.setattr(refresh, "RATES_URL", url)
        said = called("catalog", "refresh")
    assert said.returncode == 0 and "currency USD: changed" in said.stdout and "token" in said.stderr
    assert (
        currencies()["USD"].cny == 7.0 and currencies()["EUR"].cny == 8.05 and currencies()["USD"].date == "2026-11-17"
    )
    assert currencies()["JPY"].date == "2026-05-08", "what the answer does not have stays"
    assert price_of("runpod", "RTX 4090").cny_per_hour == pytest.approx(0.74 * 7)


@pytest.mark.parametrize(("text", "status"), [("<html>", 200), ("", 500), ("x" * (5 << 20), 200)])
def test_a_broken_answer_is_said_in_a_line_and_changes_nothing(monkeypatch, text, status):
    with served(text, status) as url:
        monkeypatch.setattr(refresh, "RATES_URL", url)
        said = called("catalog", "refresh")
    assert said.returncode == 1 and "nothing was refreshed" in said.stderr and "Traceback" not in said.stderr
    assert not refreshed_file().exists()


def test_without_a_network_it_is_said_in_a_line(monkeypatch):
    monkeypatch.setattr(refresh, "RATES_URL", "http://127.0.0.1:9/")
    said = called("catalog", "refresh")
    assert said.returncode == 1 and "cannot be reached" in said.stderr
    said = called("catalog", "refresh", "--from", "http://127.0.0.1:9/")
    assert said.returncode == 1 and len(said.stderr.splitlines()) == 1
