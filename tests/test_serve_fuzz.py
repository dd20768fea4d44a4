"""Requests that nobody wrote: schemathesis makes them from our own OpenAPI document."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from serve_engine import ThreadEngine, serving
from sojourn.infer.load import load_model


@pytest.mark.slow
def test_schemathesis_finds_no_server_error(tiny) -> None:
    engine = ThreadEngine(load_model(str(tiny.base), "cpu"))
    with serving(engine, request_seconds=60) as served:
        document = served.get("/openapi.json").json()
        for schema in document["components"]["schemas"].values():
            if schema.get("properties", {}).get("temperature"):
                schema["properties"]["model"] = {"const": "tiny"}  # most requests pass the first check
        (tiny.home / "openapi.json").write_text(json.dumps(document))
        command = [
            sys.executable, "-m", "schemathesis.cli", "run", str(tiny.home / "openapi.json"), "--url", served.url,
            "--checks", "not_a_server_error,status_code_conformance,content_type_conformance",
            "--max-examples", "150",
            "--request-timeout", "90", "--mode", "all", "--no-color",
        ]  # fmt: skip
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1500)
        (tiny.home / "schemathesis.txt").write_text(found.stdout + found.stderr)
        print("\n".join(line[:300] for line in found.stdout.splitlines()[-150:]))
        assert found.returncode == 0
        assert not served.lines("internal_error") and not served.lines("server")
        statuses = {line["status"] for line in served.lines()}
        assert 200 in statuses and 400 in statuses and not {status for status in statuses if status >= 500}
        assert served.gateway.taken == 0 and engine.running == 0
