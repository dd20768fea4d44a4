"""`sojourn plan ORG/NAME` of a model that the catalogue does not have: only its config.json is fetched, once."""

import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from conftest import called

CONFIG = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 4, "intermediate_size": 5632, "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip
PLAN = ("plan", "some-org/new-model-7b", "train.steps=10", "--gpu", "4090", "--json")


class Hub(ThreadingHTTPServer):
    def __init__(self):
        self.asked, self.tokens, self.status, self.body = [], [], 200, json.dumps(CONFIG).encode()
        super().__init__(("127.0.0.1", 0), _Answer)


class _Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self):
        self.server.asked.append(self.path)
        self.server.tokens.append(self.headers.get("Authorization"))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(home, monkeypatch):
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("SOJOURN_HOME", str(home))
    monkeypatch.setenv("HF_HOME", str(home / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.shutdown()
    server.server_close()


def test_only_config_json_is_fetched_from_the_mirror_and_only_once(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    for _ in range(2):
        found = json.loads(called(*PLAN).stdout)
        assert found["model"]["name"] == "new-model-7b" and found["model"]["hidden"] == 2048
    assert hub.asked == ["/some-org/new-model-7b/resolve/main/config.json"] and hub.tokens == ["Bearer secret"]


def test_a_model_of_the_catalogue_asks_nobody(hub):
    assert called("plan", "Qwen/Qwen2.5-7B-Instruct", "train.steps=10", "--gpu", "4090").returncode == 0
    assert hub.asked == []


def test_what_huggingface_hub_has_downloaded_is_used(hub, home):
    folder = home / "hf/hub/models--some-org--new-model-7b"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("0123456789abcdef")
    (folder / "snapshots/0123456789abcdef").mkdir(parents=True)
    (folder / "snapshots/0123456789abcdef/config.json").write_text(json.dumps({**CONFIG, "hidden_size": 1024}))
    assert json.loads(called(*PLAN).stdout)["model"]["hidden"] == 1024 and hub.asked == []


def test_an_old_copy_is_fetched_again_and_counts_where_nothing_answers(hub, home, monkeypatch):
    assert called(*PLAN).returncode == 0
    kept = home / "hub-configs/some-org/new-model-7b/config.json"
    os.utime(kept, (time.time() - 40 * 86400,) * 2)
    assert called(*PLAN).returncode == 0 and len(hub.asked) == 2
    os.utime(kept, (time.time() - 40 * 86400,) * 2)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert called(*PLAN).returncode == 0


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({"HF_HUB_OFFLINE": "1"}, 2, "HF_HUB_OFFLINE is set"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, 1, "cannot be reached"),
        ({"HF_ENDPOINT": "ftp://x"}, 2, "HF_ENDPOINT must begin"),
        ({"status": 404}, 2, "no config.json of some-org/new-model-7b"),
        ({"status": 401}, 2, "HF_TOKEN"),
        ({"status": 403}, 2, "HF_TOKEN"),
        ({"status": 500}, 1, "HTTP 500"),
        ({"body": b"<html>"}, 1, "not its config.json"),
        ({"body": b"\xff\xfe"}, 1, "not UTF-8"),
        ({"body": b"[" * 100_000}, 1, "not its config.json"),
        ({"body": b"[1]"}, 2, "config.json is a table"),
        ({"body": b"{}"}, 2, "hidden_size"),
        ({"body": b" " * (5 << 20)}, 1, "more than 4 MiB"),
    ],
)
def test_what_goes_wrong_is_one_line(hub, monkeypatch, change, code, says):
    for name, value in change.items():
        if name.isupper():
            monkeypatch.setenv(name, value)
        else:
            setattr(hub, name, value)
    said = called(*PLAN)
    assert said.returncode == code and says in said.stderr and len(said.stderr.splitlines()) == 1
