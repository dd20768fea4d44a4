"""Requests to the board that nobody wrote: none ends in a 500, none reaches a file outside."""

from __future__ import annotations

import json
import random
import string
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

from sojourn.board.app import make_app, make_board
from sojourn.board.guard import HEADER

_ODD = (
    "..", "../..", "/etc/passwd", "%00", "\x00", "a" * 5000, "-1", "NaN", "1e309", "{}", "☃", "\ud800", "~",
    ".", "'", '"',
)  # fmt: skip
_FORMS = (
    {"gpu": 5}, {"gpu": [None]}, {"budget": []}, {"deadline": -1}, {"settings": {"data.sources": "/etc/passwd"}},
    {"settings": {"data.sources": "/dev/zero"}}, {"settings": {"model.base": "/"}}, {"settings": {"name": "../../x"}},
)  # fmt: skip
_BODIES = (
    {}, [], None, 1, "x", {"tags": None}, {"tags": [None]}, {"settings": []}, {"settings": {"train.steps": {}}},
    {"settings": {"": 1}}, {"settings": {"a": [[]]}}, {"preset": 1}, {"preset": "../../x"}, {"checkpoint": {}},
    {"checkpoint": "x"}, {"to": 1}, {"beside": "\x00"}, *({"preset": "smoke", **form} for form in _FORMS),
)  # fmt: skip


def _text(draw: random.Random) -> str:
    if draw.random() < 0.6:
        return draw.choice(_ODD)
    return "".join(draw.choice(string.printable) for _ in range(draw.randrange(1, 20)))


@pytest.mark.slow
def test_no_request_ends_in_a_500(home, monkeypatch):
    from sojourn.board.tasks import Tasks

    monkeypatch.setattr(Tasks, "start", lambda self, words, run=None, url=None: {"id": "x", "words": words})
    (home / "secret.txt").write_text("a secret of this machine")
    run = home / "runs" / "one"
    run.mkdir(parents=True)
    (run / "run.yaml").write_text("extends: smoke\n")
    damaged = b'{"kind": "train"}\n\x00\xff\n{"kind": "train", "step": 1, "time": 1, "loss": 1e999}\n'
    (run / "metrics.jsonl").write_bytes(damaged)
    app = make_app(make_board(home, [], "t", local=True, ask_hosts=False))
    draw = random.Random(0)
    with TestClient(app, "http://127.0.0.1", headers={HEADER: "t"}, raise_server_exceptions=False) as client:
        paths = client.get("/openapi.json").json()["paths"]
        routes = [(path, method, one) for path, methods in paths.items() for method, one in methods.items()]
        for _ in range(3000):
            path, method, about = draw.choice(routes)
            query = {}
            for parameter in about.get("parameters", ()):
                name = parameter["name"]
                value = "one" if name == "run_id" and draw.random() < 0.7 else _text(draw)
                if parameter["in"] == "path":
                    path = path.replace(f"{{{name}}}", quote(value.encode(errors="replace"), safe=""))
                elif draw.random() < 0.7:
                    query[name] = value.encode(errors="replace")
            body = json.dumps(draw.choice(_BODIES)).encode() if draw.random() < 0.9 else draw.randbytes(50)
            content = {"content": body} if method == "post" else {}
            answer = client.request(method, path, params=query, **content)
            assert answer.status_code < 500, (method, path, query, content, answer.text[:500])
            assert "a secret of this machine" not in answer.text and "root:x:" not in answer.text
