"""The board in Chinese: every sentence that it can show has a translation, and routes answer in the page's language."""

from __future__ import annotations

import ast
import json
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from board_messages import SOURCE, reached, sentences
from sojourn.board.app import make_app, make_board
from sojourn.board.chinese import catalogues, in_chinese, localized_values
from sojourn.board.guard import HEADER
from sojourn.board.report import report_html
from sojourn.catalog.datasets import datasets
from sojourn.catalog.gpus import gpus
from sojourn.config.load import load_run
from sojourn.config.preset import presets
from sojourn.errors import UserError
from sojourn.plan.offers import plan_device
from sojourn.resolve.device_spec import PACKAGES, DeviceSpec
from sojourn.resolve.model_spec import model_spec_of
from sojourn.resolve.resolve import resolve
from sojourn.run.folder import RunFolder

TOKEN = "page-token"
ZH = {"accept-language": "zh"}
# The commands that the board starts, and those that a launch runs on the box.
COMMANDS = tuple(f"cli/{name}.py" for name in ("export", "launch", "main", "move", "pull", "serve", "stop", "train"))
ON_THE_BOX = ("cli/doctor.py", "cli/prepare.py", "cli/rehearse.py", "remote/box")
# Others whose words are the same: evaluations, checks, and what lets a box go through its platform's API.
BESIDE = ("board", "cli/eval.py", "cli/verify.py", "cli/verify_resume.py", "export/quantize",
          "infer/runtimes", "remote/first_contact.py", "remote/release.py")  # fmt: skip
# Files without a word for the board, by what they make: the explanations of `sojourn plan --explain`, which the board
# does not start; the card and the probes of an export; pictures; answers of the API of `sojourn serve` to its clients.
NEVER_SHOWN = frozenset({
    *(f"estimate/{name}.py" for name in ("activations", "backward_buffers", "memory", "model_states", "step_time")),
    "export/card.py", "export/probes.py",
    *(f"plot/{name}.py" for name in ("data_report", "lines", "loss", "scores", "svg")),
    *(f"serve/{name}.py" for name in ("admin", "api_chat", "api_completions", "app", "chat_page", "errors", "formats")),
    *(f"serve/{name}.py" for name in ("metrics", "middleware", "proxy", "schemas", "streaming", "tools")),
})  # fmt: skip
# What reads like a sentence there, but is a list of names, a script, a text for a test, or a pattern; of long ones the
# beginnings.
NOT_SHOWN = set(json.loads(Path(__file__).with_name("board_not_shown.json").read_text()))
MOST_OF_A_BEGINNING = 70  # characters
HAN = "[\u4e00-\u9fff]"
_NAMES = """
adamw all auto bf16 capping char chat cpu cuda ddp deepspeed dropout export false flex fly for fsdp full
gcc gemma gguf graph grouped head int8 kernels llama logit logits lora math mistral mixtral move mps much
muon nowhere null off offload on one optimizer or paper phi3 pip pull qlora quack qwen2 rank resume
router sdpa selective single small smoke soft sojourn stop tensorboard token tokens torch train trian
triton true varlen verify
"""
NAMES = frozenset(_NAMES.split())
_COMMAND = re.compile(r"(?:sojourn|pip install) [a-z'][^；，。）]*")


@pytest.fixture(scope="module")
def shown() -> list[str]:
    return [file for file in reached(*COMMANDS, *ON_THE_BOX, *BESIDE) if file not in NEVER_SHOWN]


def english_left(text: str) -> set[str]:
    """Words of prose, without names, keys, paths and commands."""
    found = re.findall(r"(?<![\w./=:@$“`'\"{-])[a-z]{2,}(?![\w./=@}-]*[\w/=@}])", _COMMAND.sub("", text))
    return set(found) - NAMES


def is_chinese(text: str) -> bool:
    return bool(re.search(HAN, text)) and not english_left(text)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SOJOURN_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def page(home: Path) -> Any:
    board = make_board(home, [], TOKEN, local=True, ask_hosts=False)
    with TestClient(make_app(board), "http://127.0.0.1", headers={HEADER: TOKEN, **ZH}) as client:
        yield client


# -- The catalogues --


def test_every_sentence_that_the_board_can_show_is_there_in_chinese(shown: list[str]) -> None:
    known = NOT_SHOWN.union(*catalogues().values())
    found = sentences(*shown)
    missing = {where: text for text, where in found.items() if not {text, text[:MOST_OF_A_BEGINNING]} & known}
    assert len(found) > 2700 and not missing, "add them to src/sojourn/board/zh"


def test_every_command_that_the_board_starts_is_looked_at() -> None:
    """A word list begins with the name of a command: ["train", …]."""
    names = {file.stem for file in (SOURCE / "cli").glob("*.py")}
    trees = [ast.parse((SOURCE / "board" / f"{name}.py").read_text("utf-8")) for name in ("actions", "app")]
    lists = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.List) and node.elts]
    firsts = {first.value for first in (one.elts[0] for one in lists) if isinstance(first, ast.Constant)}
    started = {f"cli/{name}.py" for name in names & firsts}
    assert {"cli/train.py", "cli/launch.py", "cli/serve.py"} <= started <= set(COMMANDS)


def test_files_that_are_imported_by_name_are_looked_at_too(shown: list[str]) -> None:
    """Those of platforms, runtimes, engines and formats, and those that go to a box."""
    packages = ("remote/platforms", "remote/box", "infer/runtimes", "serve/engines", "export/quantize", "evals")
    files = {str(file.relative_to(SOURCE)) for one in packages for file in (SOURCE / one).glob("[!_]*.py")}
    assert files - set(shown) == set()


def test_every_translation_is_of_a_sentence_in_the_code_and_stands_once(shown: list[str]) -> None:
    """Presets, data sets, the system's errors, and phrases that the code puts together have catalogues of their own."""
    for package, texts in catalogues().items():
        if (SOURCE / package).is_dir():
            found = sentences(*(file for file in shown if file.startswith(f"{package}/")))
            assert [text for text in texts if text not in found] == []
    all_texts = [text for one in catalogues().values() for text in one]
    assert len(all_texts) == len(set(all_texts))


def test_translations_have_the_values_of_their_sentences_and_chinese_punctuation() -> None:
    for texts in catalogues().values():
        for english, chinese in texts.items():
            # A plural's ending may be left out.
            values, ours = (set(re.findall(r"\{\d+\}", text)) for text in (re.sub(r"\w\{\d\}", "", english), chinese))
            assert values <= ours <= set(re.findall(r"\{\d+\}", english)), english
            assert not re.search(rf"{HAN}[,;:?!]", re.sub(r"\[.*?\]", "", chinese)), chinese
            assert not re.search(rf"{HAN}[A-Za-z0-9{{](?!\d*}})|[A-Za-z0-9]{HAN}", chinese), chinese
            assert english.count(" · ") == chinese.count(" · ")


def test_presets_and_data_sets_are_described_in_chinese() -> None:
    texts = [one.summary for one in presets()] + [one.description for one in datasets()]
    assert not {text: in_chinese(text) for text in texts if not re.search(HAN, in_chinese(text))}


# -- Sentences --


@pytest.mark.parametrize(
    ("english", "chinese"),
    [
        ("usual for LoRA", "LoRA 的常用值"),
        ("needs a CUDA GPU, but this run is on cpu", "需要 CUDA 显卡，但本次训练在 cpu 上"),
        ("planned into 97% of the 140 GiB free with a micro batch of 8", "按空闲 140 GiB 的 97% 规划，微批大小为 8"),
        ("tensorboard is not installed", "未安装 tensorboard"),
        (
            "step 10/227 · loss 6.7215 · 11,432 tok/s · 0.5 GiB · 5s left",
            "第 10/227 步 · 损失 6.7215 · 11,432 tok/s · 0.5 GiB · 还需 5s",
        ),
        (
            "stopped by SIGTERM at step 40 of 227, saved in step-00000040; run the same command to resume",
            "在第 40 步（共 227 步）因 SIGTERM 停止，已保存到 step-00000040；运行同一命令即可继续",
        ),
        (
            "sojourn: data.sources: my.jsonl: no such file or folder; check the spelling, or name a folder or a glob",
            "sojourn：data.sources：my.jsonl：没有这个文件或文件夹；请检查拼写，或指定文件夹或通配",
        ),
        ("done: the model is in /runs/one/final", "完成：模型在 /runs/one/final"),
        ("== looking for what is missing at pypi.org", "== 正在查找缺少的软件包，在 pypi.org"),
        ("held-out rows of the run: perplexity (512 examples)", "该训练留出的行：困惑度（512 个样例）"),
        (
            "my4090: sojourn doctor: warn: ram: 1.0 GiB free of 15.0 GiB: loading a model may be killed "
            "(fix: stop other programs)",
            "my4090：sojourn doctor：警告：ram：空闲 1.0 GiB，共 15.0 GiB：加载模型时可能被终止"
            "（解决：请停止其他程序）",
        ),
        (
            "sojourn: AutoDL: out of stock: RTX 4090; see sojourn cloud offers autodl, or try again later",
            "sojourn：AutoDL：无库存：RTX 4090；见 sojourn cloud offers autodl，或稍后再试",
        ),
    ],
)
def test_a_sentence_of_several_parts_is_translated_with_its_values(english: str, chinese: str) -> None:
    assert in_chinese(english) == chinese


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "\n\n", "Traceback (most recent call last):", '  File "/x/y.py", line 3, in main',
        "ValueError: the size of tensor a must match the size of tensor b at non-singleton dimension 1",
        "{0} {1}", "}{", "数据已准备好：/数据/训练", "a" * 5000, "\x00\ud800", "训练.jsonl",
        "no data is named" + ", a" * 300,
        "Collecting torch==2.7.1", "Requirement already satisfied: numpy>=1.26 in /usr/lib/python3 (from torch)",
        "Warning: Permanently added '[1.2.3.4]:22' (ED25519) to the list of known hosts.",
        "python -m pip install --upgrade pip",
        "/usr/lib/torch/nn/functional.py:9: UserWarning: the target size is different to the input size; this is wrong",
        "[rank0]:[W1 ProcessGroupNCCL.cpp:1250] Warning: the process group has not been destroyed on exit",
        "RuntimeError: CUDA error: an illegal memory access was encountered", "Downloading shards: 100%",
        "  data.jsonl:1  Once‹ upon a time there was one user who had no data, and the file was gone›",
    ],
)  # fmt: skip
def test_what_is_no_message_of_ours_stays_as_it_is(text: str) -> None:
    assert in_chinese(text) == text


def test_a_sentence_is_translated_by_its_own_template_and_by_no_other() -> None:
    """Values side by side, facts in a line and phrases may be divided in several ways."""
    wrong, checked = {}, 0
    for texts in (texts for package, texts in catalogues().items() if (SOURCE / package).is_dir()):
        for english, chinese in texts.items():
            is_plain = not re.search(r"\}\{|\n| · ", english) and len(re.sub(r"\{\d+\}", "", english)) > 12
            if is_plain and english == english.strip():
                checked += 1
                given, expected = (re.sub(r"\{(\d+)\}", r"/v\1.x", text) for text in (english, chinese))
                if in_chinese(given).replace(" ", "") != expected.replace(" ", ""):
                    wrong[given] = in_chinese(given)
    assert checked > 2000 and wrong == {}


def test_any_text_is_answered_soon() -> None:
    draw, words = random.Random(0), [text for one in catalogues().values() for text in one]
    in_chinese("warm")
    for _ in range(60):
        text = "".join(draw.choice((*draw.sample(words, 3), "; ", ": ", ", ", "x", "{0}", " · ")) for _ in range(9))
        started = time.monotonic()
        assert isinstance(in_chinese(text[:1000]), str) and time.monotonic() - started < 5
    lines = "\n".join(f"step {n}/2000 · loss {n / 7:.4f} · 11,{n:03} tok/s · 0.5 GiB · {n}s left" for n in range(2000))
    started = time.monotonic()
    assert in_chinese(lines).count("损失") == 2000 and time.monotonic() - started < 20


# -- Reasons of auto --


def _devices(config: Any, draw: random.Random) -> list[DeviceSpec]:
    """A GPU of the catalogue, and a machine without one, or Apple's."""
    card, packages = draw.choice(list(gpus())), frozenset(draw.sample(sorted(PACKAGES), draw.randrange(len(PACKAGES))))
    bare = DeviceSpec(
        draw.choice(("cpu", "cpu", "mps")), "this machine", "fp32",
        "torch is not installed, so bf16 could not be measured", packages=packages,
        has_gcc=draw.random() < 0.5, ranks=draw.choice((1, 1, 2)),
    )  # fmt: skip
    return [plan_device(config, card, draw.choice((1, 1, 2, 8))), bare]


def test_every_reason_of_auto_is_in_chinese(home: Path) -> None:
    draw, reasons, refusals = random.Random(0), set[str](), set[str]()
    choices: dict[str, tuple[Any, ...]] = {
        "train.steps": (10, 1000, 20_000), "train.global_batch": (8, 48), "data.max_length": (512, 4096),
        "train.optimizer": ("adamw", "adamw_8bit", "muon"), "train.deterministic": ("off", "off", "on"),
        "train.precision": ("auto", "auto", "fp16", "fp32"), "train.compile": ("auto", "auto", "on", "off"),
        "train.attention": ("auto", "auto", "varlen", "sdpa"), "train.cuda_graphs": ("auto", "auto", "on"),
        "train.fp8": ("off", "off", "on"), "train.offload": ("off", "off", "optimizer", "all"),
        "train.activation_checkpointing": ("auto", "auto", "full", "offload"), "data.packing": ("packed", "off"),
        "advanced.hopper_kernels": ("auto", "auto", "on"), "advanced.cpu_kernels": ("auto", "auto", "on"),
        "log.tensorboard": ("auto",),
    }  # fmt: skip
    bases = ("qwen2.5-0.5b", "llama-3.1-8b", "gemma-2-9b", "phi-3.5-mini", "qwen3-30b-a3b", "mistral-7b-v0.3")
    for _ in range(250):
        words = [f"{key}={draw.choice(values)}" for key, values in choices.items()]
        kind = draw.choice(("pretrain", "full", "lora", "qlora"))
        if kind == "pretrain":
            words = ["medium", f"model.params={draw.choice(('20M', '900M'))}", *words]
        else:
            words = ["lora-20k", f"model.base={draw.choice(bases)}", f"method.kind={kind}", *words]
        try:
            config = load_run(words).config
        except UserError as error:
            refusals.add(str(error))
            continue
        for device in _devices(config, draw):
            try:
                found = resolve(config, model_spec_of(config), device)
            except UserError as error:
                refusals.add(str(error))
                continue
            reasons.update(reason.partition(": ")[2] for reason in found.reasons.values())
    assert len(reasons) > 40 and len(refusals) > 15
    shown = {text: in_chinese(text) for text in reasons | refusals if text}
    assert {text: chinese for text, chinese in shown.items() if not is_chinese(chinese)} == {}


def test_reasons_of_old_runs_are_translated_where_they_match() -> None:
    old = {"train.lr": "0.0002: usual for LoRA", "train.compile": "off: for reasons nobody remembers"}
    auto = {key: {"value": text.partition(": ")[0], "reason": text.partition(": ")[2]} for key, text in old.items()}
    shown = localized_values({"auto": auto}, frozenset({"reason"}), "zh")["auto"]
    assert shown["train.lr"] == {"value": "0.0002", "reason": "LoRA 的常用值"}
    assert shown["train.compile"]["reason"] == "for reasons nobody remembers"
    assert localized_values(auto, frozenset({"reason"}), "en") is auto


# -- Routes --


def _write_run(home: Path) -> RunFolder:
    run = RunFolder(home / "runs" / "one")
    run.path.mkdir(parents=True)
    (run.path / "run.yaml").write_text("extends: smoke\nname: one\n")
    message = "stopped by SIGTERM at step 4 of 9, saved in step-00000004; run the same command to resume"
    status = {"state": "stopped", "step": 4, "total_steps": 9, "pid": 1, "started": 0.5, "updated": 1.0}
    (run.path / "status.json").write_text(json.dumps({**status, "message": message}))
    (run.path / "environment.json").write_text(json.dumps({"auto": {"train.compile": "off: compiling is for GPUs"}}))
    ending = "at ¥1.90 the run saves and stops"
    events = [
        {"kind": "out_of_memory", "step": 2, "message": "out of memory on another rank", "now": "train.micro_batch=1"},
        {"kind": "budget", "step": 3, "message": f"¥1.00 of the budget of ¥2.00 are spent; {ending}"},
        {"kind": "stopped", "step": 4, "why": "the time limit of 10m"},
    ]  # fmt: skip
    run.events.write_text("".join(json.dumps({"time": 1.0, **one}) + "\n" for one in events))
    return run


def test_a_run_its_reasons_and_its_events_are_in_the_language_of_the_page(home: Path, page: TestClient) -> None:
    run = _write_run(home)
    for _ in range(100):
        if found := page.get("/api/runs").json()["runs"]:
            break
        time.sleep(0.05)
    assert "运行同一命令即可继续" in found[0]["message"]
    assert page.get("/api/runs/one").json()["auto"]["train.compile"]["reason"] == "编译只用于 GPU"
    events = page.get("/api/runs/one/events").json()["events"]
    assert events[0]["message"] == "另一个 rank 显存不足" and events[0]["now"] == "train.micro_batch=1"
    assert events[1]["message"] == "已花费预算 ¥2.00 中的 ¥1.00；达到 ¥1.90 时训练会保存并停止"
    assert events[2]["why"] == "10m 的时间上限" and events[2]["kind"] == "stopped"
    english = page.get("/api/runs/one/events", headers={"accept-language": "en"}).json()["events"]
    assert english[0]["message"] == "out of memory on another rank"
    assert english[2]["why"] == json.loads(run.events.read_text().splitlines()[2])["why"]
    (run.path / "run.yaml").write_text("train: {lr: fast}")
    assert re.search(HAN, page.get("/api/runs/one").json()["config"]["error"])


def test_errors_of_all_routes_are_in_chinese(home: Path, page: TestClient) -> None:
    _write_run(home)
    answers = [page.get(path) for path in ("/api/runs/none", "/api/tasks/none", "/api/data/none", "/page/none.js")]
    answers += [page.get("/api/data/none/examples"), page.post("/api/tasks/none/stop", json={})]
    answers += [page.post("/api/plan", json=form) for form in (
        {}, {"preset": "none"}, {"preset": "lora-20k", "gpu": ["RTX 9999"]}, {"preset": "smoke", "platform": "nowhere"},
        {"preset": "smoke", "budget": "much"}, {"preset": "smoke", "deadline": "5"},
        {"preset": "lora-20k", "settings": {"model.base": "none-7b"}},
    )]  # fmt: skip
    answers += [page.post("/api/start", json={"preset": "smoke", "settings": settings}) for settings in (
        {"train.steps": "abc"}, {"train.lr": -1}, {"trian.lr": 1}, {"train.warmup": 1.5},
        {"train.master_weights": "bf16", "method.kind": "lora"},
        {"model.d_model": 100, "model.num_heads": 3}, {"data.max_length": 0},
    )]  # fmt: skip
    answers.append(page.post("/api/preview", json={"preset": "smoke", "settings": {"data.sources": "none.jsonl"}}))
    for _ in range(100):
        if page.get("/api/runs").json()["runs"]:
            break
        time.sleep(0.05)
    for action, body in (("fly", {}), ("verify", {"checkpoint": 3}), ("pull", {}), ("move", {"to": "x"}),
                         ("export", {"to": "paper"}), ("chat", {"checkpoint": 7})):  # fmt: skip
        answers.append(page.post(f"/api/runs/one/{action}", json=body))
    assert {answer.status_code for answer in answers} == {400, 404}
    names = r"（有 .*）|没有 'paper'；可选：.*"
    errors = [re.sub(names, "", answer.json()["error"]) for answer in answers]
    assert [error for error in errors if not is_chinese(error)] == ["to："]


def test_plans_and_their_advice_are_in_chinese(page: TestClient) -> None:
    form = {
        "preset": "lora-20k",
        "settings": {"model.base": "llama-3.1-8b", "method.kind": "full"},
        "gpu": ["RTX 4090"],
    }
    plan = page.post("/api/plan", json=form).json()
    texts = [*(change for one in plan["advice"] for change in one["changes"]), *plan["notes"], *plan["data_notes"]]
    texts += [text for one in plan["offers"] for text in (one["reason_not"], one["range_reason"]) if text]
    assert plan["advice"] and len(texts) > 3
    assert not {text for text in texts if english_left(text) or not re.search(rf"{HAN}|^[-\w. ]+$", text)}


def test_the_output_of_a_command_is_in_chinese_line_by_line(home: Path, page: TestClient) -> None:
    """A line that is still being written comes with its end."""
    task = make_board(home, [], TOKEN, local=True, ask_hosts=False).tasks.start(["stop", "nothing"])
    for _ in range(600):
        if page.get(f"/api/tasks/{task['id']}").json()["state"] != "running":
            break
        time.sleep(0.1)
    text = page.get(f"/api/tasks/{task['id']}").json()["text"]
    assert "没有名为“nothing”的训练" in text and not english_left(text), text
    english = page.get(f"/api/tasks/{task['id']}", headers={"accept-language": "en"}).json()["text"]
    assert english.startswith("sojourn: no run is called “nothing”")
    tasks = make_board(home, [], TOKEN, local=True, ask_hosts=False).tasks
    tasks.output_file(task["id"]).write_text("step 1/9 · loss 2.0\nstep 2/9 · lo")
    assert tasks.output(task["id"], 0, whole_lines=True) == ("step 1/9 · loss 2.0\n", 21)
    assert tasks.output(task["id"], 21, whole_lines=True) == ("", 21)
    assert tasks.output(task["id"], 21) == ("step 2/9 · lo", 35)


def test_a_report_in_chinese_has_its_reasons_and_events_in_chinese(home: Path) -> None:
    run = _write_run(home)
    text = report_html(run, "zh")
    assert "编译只用于 GPU" in text and "另一个 rank 显存不足" in text and "<td>显存不足</td>" in text
    english = report_html(run, "en")
    assert "compiling is for GPUs" in english and "<td>out_of_memory</td>" in english
