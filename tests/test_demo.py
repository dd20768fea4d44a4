"""The demo, really run: it is killed, goes on, and the model has learnt something it could not do before."""

import json

from conftest import called
from sojourn.storage.files import read_json_lines


def test_the_fast_demo_is_killed_goes_on_and_learns(home, fork_server):
    said = fork_server.run("demo", "--fast", "--json", fork_children=True)
    assert said.returncode == 0, said.stderr
    outcome = json.loads(said.stdout)
    assert 0 < outcome["continued_from"] <= outcome["killed_at"] < outcome["steps"]
    assert outcome["before"] <= 0.02
    assert outcome["after"] > outcome["before"] + 0.1
    starts = [
        event["step"] for event in read_json_lines(home / "runs" / "demo" / "events.jsonl") if event["kind"] == "start"
    ]
    assert starts == [0, outcome["continued_from"]]
    for shown in (
        "1 doctor",
        "2 plan",
        "3 prepare",
        "4 train",
        "5 ask",
        "held-out exact match",
        "sojourn chat demo",
        "sojourn plan medium",
    ):
        assert shown in said.stderr
    assert len(said.stderr.splitlines()) <= 50
    again = called("generate", "demo", "--prompt", "hello", "--max-tokens", "4")
    assert again.returncode == 0, again.stderr
