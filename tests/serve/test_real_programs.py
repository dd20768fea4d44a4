"""`sojourn serve` with real programs: llama.cpp behind it, and vLLM's own benchmark before it.

SOJOURN_REAL_GGUF names a chat model's GGUF file, SOJOURN_REAL_MODEL one's folder; SOJOURN_LLAMACPP_PYTHON and
SOJOURN_VLLM_PYTHON the Pythons that have these programs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess

import openai
import psutil
import pytest

from conftest import sojourn
from real_lora import REAL, needs_model
from serve_engine import Command, wait_until
from sojourn.infer.runtimes.managed_environment import VLLM, clean_environment
from sojourn.infer.runtimes.registry import available

GGUF = os.environ.get("SOJOURN_REAL_GGUF", "")
FRANCE = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
# As `vllm bench serve` does, which does not start in vLLM's build for CPUs: its package has another name there
BENCH = (
    "from vllm.benchmarks.serve import add_cli_args, main; "
    "from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser; "
    "parser = Parser(); add_cli_args(parser); main(parser.parse_args())"
)


@pytest.mark.skipif(not GGUF, reason="SOJOURN_REAL_GGUF names no file")
@pytest.mark.skipif(bool(available("llamacpp")), reason=available("llamacpp"))
def test_llamacpp_serves_a_gguf_file_and_is_started_again_when_it_is_killed() -> None:
    command = Command(GGUF, "--engine", "llamacpp", "--device", "cpu")
    client = openai.OpenAI(base_url=command.url, api_key="none", max_retries=0, timeout=300)
    given = {"model": "real", "messages": FRANCE, "max_tokens": 24, "temperature": 0}
    try:
        whole = client.chat.completions.create(**given, logprobs=True).choices[0]
        assert "Paris" in whole.message.content and whole.finish_reason == "stop"
        chunks = client.chat.completions.create(**given, stream=True)
        assert "".join(one.choices[0].delta.content or "" for one in chunks) == whole.message.content
        stopped = client.chat.completions.create(**given, stop=["Paris"])
        assert stopped.choices[0].message.content == whole.message.content.split("Paris")[0]
        assert stopped.usage.prompt_tokens_details.cached_tokens > 20  # the same prompt: its row is copied
        stream = iter(client.chat.completions.create(**{**given, "max_tokens": 400}, stream=True,
                                                     extra_body={"ignore_eos": True}))  # fmt: skip
        next(stream)
        (child,) = [one for one in psutil.Process(command.process.pid).children(recursive=True)
                    if "llamacpp_child" in " ".join(one.cmdline())]  # fmt: skip
        child.kill()
        with pytest.raises(openai.APIError, match="killed"):
            list(stream)
        wait_until(lambda: any("engine_restarted" in line for line in command.lines), 200)
        assert client.chat.completions.create(**given).choices[0].message.content == whole.message.content
        command.process.send_signal(signal.SIGTERM)
        assert command.process.wait(60) == 0
        assert not child.is_running()
    finally:
        command.process.kill()


@pytest.mark.skipif(not GGUF, reason="SOJOURN_REAL_GGUF names no file")
@pytest.mark.skipif(bool(available("llamacpp")), reason=available("llamacpp"))
def test_bench_serve_has_llamacpp_beside_us() -> None:
    done = sojourn("bench", "serve", GGUF, "--clients", "1,2", "--lengths", "16x8", "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {row["engine"] for row in rows} >= {"sojourn", "transformers", "llama.cpp"}, done.stderr
    assert all(row["errors"] == 0 and row["tokens_per_second"] > 0 for row in rows)
    print(done.stderr)


@needs_model
@pytest.mark.skipif(bool(available("vllm")), reason=available("vllm"))
@pytest.mark.parametrize(("backend", "path"), [("openai", "completions"), ("openai-chat", "chat/completions")])
def test_vllm_bench_serve_runs_against_it(backend: str, path: str) -> None:
    command = Command(REAL, "--max-length", "2048")
    try:
        done = subprocess.run(
            [str(VLLM.python()), "-c", BENCH, "--backend", backend, "--base-url", command.url.removesuffix("/v1"),
             "--endpoint", f"/v1/{path}", "--model", "real", "--tokenizer", REAL, "--dataset-name", "random",
             "--random-input-len", "64", "--random-output-len", "16", "--num-prompts", "12", "--max-concurrency", "4"],
            env=clean_environment(), capture_output=True, text=True, timeout=900, check=False,
        )  # fmt: skip
        print("\n".join(line for line in done.stdout.splitlines() if ":" in line or "=" in line)[-2500:])
        assert done.returncode == 0, done.stderr[-2000:]
        assert "Successful requests:                     12" in done.stdout
        assert "Failed requests:                         0" in done.stdout
    finally:
        command.process.kill()
