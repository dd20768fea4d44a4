"""The chat page in a real browser: what a person clicks and types, and what is on the screen afterwards."""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_engine import Served, ThreadEngine, long_base, serving, wait_until
from sojourn.infer.load import LoadedModel, load_model
from sojourn.serve import chat_page
from sojourn.serve.auth import KeyRing, Quota, add_key, load_keys
from sojourn.serve.feedback import PREFERENCES, SFT, FeedbackFolder
from sojourn.web.static import ASSETS
from webdriver import ENTER, ESCAPE, SHIFT, UP, Browser, browsing, chromium

pytestmark = pytest.mark.skipif(chromium() is None, reason="no chromium and chromedriver; make packages installs them")
FILES = sorted([*chat_page.FOLDER.iterdir(), *ASSETS.iterdir()])
ANSWERED = (
    "document.querySelectorAll('#messages .message').length == arguments[0] && document.getElementById('stop').hidden"
)


@pytest.fixture(scope="module")
def loaded(tiny) -> LoadedModel:
    return load_model(str(long_base(tiny.base)), "cpu")


@pytest.fixture(scope="module")
def engine(loaded: LoadedModel) -> ThreadEngine:
    """Two models: the second answers otherwise."""
    import torch

    made, other = ThreadEngine(loaded), copy.deepcopy(loaded.model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)) * 0.1)
    made._models["second"] = other
    made.info = replace(made.info, adapters=("second",))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def served(engine: ThreadEngine, folder: Path) -> Iterator[Served]:
    with serving(engine, feedback=FeedbackFolder(folder / "feedback")) as made:
        yield made


@pytest.fixture(scope="module")
def opened(folder: Path) -> Iterator[Browser]:
    with browsing(folder) as made:
        yield made


@pytest.fixture
def page(opened: Browser, served: Served, engine: ThreadEngine) -> Iterator[Browser]:
    """The page as somebody sees it who has never been here."""
    opened.size(1200, 800)
    opened.dark(False)
    forget(opened, served)
    opened.log()
    show(opened, served)
    yield opened
    engine.pause = 0.0
    served.gateway.keys = KeyRing([])


def forget(page: Browser, served: Served) -> None:
    page.open(served.url + "/page/icon.svg")  # the page itself saves when it is left
    page.js("localStorage.clear(); sessionStorage.clear()")


def show(page: Browser, served: Served) -> None:
    page.open(served.url)
    page.wait("document.querySelectorAll('#model option').length")


def choose(page: Browser, **given: Any) -> None:
    page.click("#settings-open")
    for name, value in {"temperature": 0, "max_tokens": 8, **given}.items():
        page.js("document.getElementById(arguments[0]).value = ''", f"p-{name}")
        page.type(f"#p-{name}", str(value))
    page.click("#settings .dialog-head button")
    page.wait("!document.querySelector('dialog[open]')")


def change(page: Browser, id: str, value: str) -> None:
    """What is chosen in a list."""
    page.js("Object.assign(document.getElementById(arguments[0]), { value: arguments[1] })", id, value)
    page.js("document.getElementById(arguments[0]).dispatchEvent(new Event('change'))", id)


def ask(page: Browser, text: str, messages: int = 2) -> None:
    page.type("#input", text + ENTER)
    page.wait(ANSWERED, messages)


def say(served: Served, *turns: str, model: str = "tiny", **given: Any) -> str:
    """What the API answers to the same conversation."""
    messages = [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(turns)]
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 8, **given}
    return str(served.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"])


def answers(page: Browser) -> list[str]:
    """As they are kept: what a model of random weights writes may be markdown by chance."""
    nodes = kept(page)["nodes"]
    shown = page.js("return [...document.querySelectorAll('.message.assistant')].map(one => one.dataset.id)")
    return [nodes[id]["content"] for id in shown]


def kept(page: Browser) -> dict[str, Any]:
    script = (
        "return Object.keys(localStorage).filter(key => key.startsWith('sojourn.chat.')).map(key => localStorage[key])"
    )
    found: dict[str, Any] = max(map(json.loads, page.js(script)), key=lambda one: one["updated"])
    return found


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / "feedback" / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_conversation_is_streamed_and_kept(page: Browser, served: Served) -> None:
    choose(page)
    ask(page, "What colour is the cat?")
    first = say(served, "What colour is the cat?")
    assert answers(page) == [first]
    ask(page, "And the dog?", 4)
    assert answers(page) == [first, say(served, "What colour is the cat?", first, "And the dog?")]
    assert (
        "8 tokens" in page.text(".message.assistant .note") and page.js("return document.activeElement.id") == "input"
    )
    show(page, served)
    assert page.count(".message") == 4 and page.text(".chat .open").startswith("What colour is the cat?")
    page.click("#new")
    assert page.count(".message") == 0
    page.click(".chat .icon")
    page.accept()
    page.wait("!document.querySelector('.chat')")
    assert page.log() == []


def test_the_page_loads_nothing_from_elsewhere_and_no_inline_script(served: Served) -> None:
    answer = served.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert answer.headers["content-type"].startswith("text/html")
    for file in FILES:
        text = file.read_text()
        assert file.name == "index.html" or served.get(f"/page/{file.name}").text == text
        addresses = set(re.findall(r"https?://[^\s\"'`\\]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not {one for one in addresses if one[8:9].isalnum()}, file
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), file
    assert served.get("/page/..%2fapp.py").status_code == served.get("/page/nothing.js").status_code == 404
    assert served.post("/page/main.js", {}).status_code == 405


def test_both_languages_have_the_same_texts() -> None:
    keys = [re.findall(r"(?<=[ {,])(\w+): \"", (chat_page.FOLDER / name).read_text()) for name in ("en.js", "zh.js")]
    assert keys[0] == keys[1] and len(keys[0]) > 60
    used = "".join(path.read_text() for path in FILES if path.name not in ("en.js", "zh.js"))
    assert [key for key in keys[0] if not re.search(rf"\b{key}\b", used)] == []


@pytest.mark.slow
def test_escape_stops_and_frees_the_place(page: Browser, served: Served, engine: ThreadEngine) -> None:
    engine.pause = 0.05
    choose(page, max_tokens=500)
    freed = engine.freed
    page.type("#input", "Say much" + SHIFT + ENTER + SHIFT + "on two lines" + ENTER)
    page.wait("document.querySelector('.assistant .markdown')?.textContent.length > 3")
    assert page.count("#send[hidden]") == 1 and page.count("[aria-busy]") == 1
    page.keys(ESCAPE)
    page.wait(ANSWERED, 2)
    wait_until(lambda: engine.freed > freed)
    assert "stopped" in page.text(".assistant .note") and answers(page)[0]
    assert page.text(".user .body") == "Say much\non two lines"


@pytest.mark.slow
def test_what_somebody_writes_outlasts_an_answer_and_what_they_delete_stays_deleted(
    page: Browser, engine: ThreadEngine
) -> None:
    engine.pause = 0.05
    choose(page, max_tokens=30)
    page.type("#input", "What colour is the cat?" + ENTER)
    page.wait("document.querySelector('[aria-busy]')")
    page.click(".user [title='Edit']")
    page.wait("document.activeElement.closest('.editor')")
    page.keys(*" Or dog?")
    page.wait(ANSWERED, 2)
    assert "Or dog?" in page.js("return document.querySelector('.editor textarea').value")
    page.keys(ESCAPE)
    page.wait("!document.querySelector('.editor')")
    page.click(".assistant [title='Another answer']")
    page.wait("document.querySelector('[aria-busy]')")
    page.click(".chat .icon")
    page.accept()
    page.wait("document.getElementById('stop').hidden && !document.querySelector('.chat')")
    assert page.js("return Object.keys(localStorage).some(key => key.startsWith('sojourn.chat.'))") is False


@pytest.mark.slow
def test_edits_and_other_answers_are_branches(page: Browser, served: Served) -> None:
    choose(page)
    ask(page, "What colour is the cat?")
    page.keys(UP)
    page.wait("document.activeElement.closest('.editor')")
    page.js("document.activeElement.select()")
    page.keys(*"Where?", ENTER)
    page.wait(ANSWERED, 2)
    assert answers(page) == [say(served, "Where?")] and page.text(".user .switch") == "2/2"
    page.click(".user .switch [title='Previous version']")
    assert answers(page) == [say(served, "What colour is the cat?")] and page.text(".user .switch") == "1/2"
    page.click(".assistant [title='Another answer']")
    page.wait(ANSWERED, 2)
    assert page.text(".assistant .switch") == "2/2"
    show(page, served)
    assert page.text(".user .switch") == "1/2" and page.text(".assistant .switch") == "2/2"


@pytest.mark.slow
def test_thumbs_and_corrections_become_training_data(page: Browser, served: Served, folder: Path) -> None:
    choose(page)
    ask(page, "How old is it?")
    original = answers(page)[0]
    page.click("[title='Good answer']")
    wait_until(lambda: [row["label"] for row in rows(folder, SFT)][-1:] == [True])
    page.click("[title='Bad answer']")
    wait_until(lambda: [row["label"] for row in rows(folder, SFT)][-1:] == [False])
    page.click("[title='Bad answer']")
    wait_until(lambda: rows(folder, SFT) == [])
    page.click(".assistant [title='Edit']")
    page.wait("document.activeElement.closest('.editor')")
    page.js("document.activeElement.select()")
    page.keys(*"Nine.")
    page.click(".editor .primary")
    wait_until(lambda: bool(rows(folder, PREFERENCES)))
    (pair,) = [row for row in rows(folder, PREFERENCES) if row["kind"] == "correction"]
    assert (pair["chosen"][0]["content"], pair["rejected"][0]["content"]) == ("Nine.", original)
    assert rows(folder, SFT)[-1]["messages"][-1]["content"] == "Nine." and page.text(".assistant .switch") == "2/2"


@pytest.mark.slow
def test_two_models_answer_side_by_side(page: Browser, served: Served, folder: Path) -> None:
    choose(page)
    page.click("#compare")
    change(page, "other", "second")
    ask(page, "Which one?", 3)
    first, second = say(served, "Which one?"), say(served, "Which one?", model="second")
    assert answers(page) == [first, second] and first != second
    page.click(".pair .message:nth-child(2) .prefer")
    wait_until(lambda: any(row["kind"] == "preference" for row in rows(folder, PREFERENCES)))
    row = rows(folder, PREFERENCES)[-1]
    assert (row["chosen"][0]["content"], row["rejected"][0]["content"], row["model"]) == (second, first, "second")
    page.click("#compare")
    ask(page, "Why?", 5)  # goes on from the better one
    assert answers(page)[-1] == say(served, "Which one?", second, "Why?")


HOSTILE = """# Title <b>x</b>
<script>window.hacked = 1</script> <img src=x onerror="window.hacked = 1">
[a](javascript:hacked=1) [b](https://example.org "t")
![i](https://example.org/i.png) **bold *it*** `<i>`

```html
<script>window.hacked = 1</script>
```

| a | b |
|---|---|
| <u>1</u> | 2 |

1. one
   - two
"""


def open_file(page: Browser, folder: Path, content: Any) -> None:
    file = folder / "opened.json"
    file.write_text(json.dumps(content))
    page.type("#file", str(file))


@pytest.mark.slow
def test_what_a_model_writes_is_never_run(page: Browser, folder: Path) -> None:
    page.js("window.hacked = 0")
    messages = [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": HOSTILE}]
    open_file(page, folder, {"messages": messages})
    page.wait("document.querySelectorAll('.message').length == 2")
    assert page.count("#messages :is(script, img, iframe, b, u, i)") == 0 and page.js("return window.hacked") == 0
    targets = page.js("return [...document.querySelectorAll('.markdown a')].map(one => one.getAttribute('href'))")
    assert targets == ["https://example.org", "https://example.org/i.png"]
    assert page.text(".markdown h2") == "Title <b>x</b>" and page.text(".markdown strong em") == "it"
    assert page.text(".markdown pre") == "<script>window.hacked = 1</script>" and page.text("td") == "<u>1</u>"
    assert page.count(".markdown ol > li > ul > li") == 1
    nested = "*" * 3000 + "`" * 3000 + "[" * 3000 + "> " * 500 + "\n|-" * 500
    open_file(page, folder, {"messages": [messages[0], {"role": "assistant", "content": nested}]})
    page.wait("document.querySelectorAll('.chat').length == 2", seconds=5)


@pytest.mark.slow
def test_tool_calls_are_shown_and_answered(page: Browser, served: Served) -> None:
    page.js("""
        const real = window.fetch;
        const data = (delta, finish_reason = null) => JSON.stringify({ choices: [{ delta, finish_reason }] });
        const piece = (...given) => `data: ${data(...given)}\\n\\n`;
        const call = (more) => ({ tool_calls: [{ index: 0, ...more }] });
        window.fetch = async (url, options) => {
          if (!String(url).endsWith("/chat/completions")) return real(url, options);
          window.sent = JSON.parse(options.body);
          window.fetch = real;
          return new Response(piece(call({ id: "c1", function: { name: "weather", arguments: "" } }))
            + piece(call({ function: { arguments: '{"city":' } }))
            + piece(call({ function: { arguments: '"Paris"}' } }))
            + piece({}, "tool_calls") + "data: [DONE]\\n\\n");
        };""")
    page.click("#settings-open")
    page.type("#tools", "[1, 2")
    page.click("#settings .dialog-head button")
    assert page.count("dialog[open]") == 1 and "Tools:" in page.text("#settings-error")
    page.js("document.getElementById('tools').value = ''")
    page.type("#tools", '[{"name": "weather", "parameters": {"type": "object"}}]')
    page.keys(ESCAPE)
    page.wait("!document.querySelector('dialog[open]')")
    choose(page)
    ask(page, "Is it raining?")
    assert page.js("return window.sent.tools[0].function.name") == "weather"
    assert page.text(".call .code-head") == "calls weather" and '"city": "Paris"' in page.text(".call pre")
    page.type(".tool-form textarea", "rain")
    page.click(".tool-form .primary")
    page.wait(ANSWERED, 4)
    assert page.text(".message.tool .body") == "rain" and page.count(".message.assistant .error") == 0


@pytest.mark.slow
def test_errors_say_what_to_do(page: Browser, served: Served, engine: ThreadEngine) -> None:
    choose(page)
    queue = served.gateway.deployments[0].queue
    waiting, queue.waiting, queue.taken = queue.waiting, -engine.info.max_requests + 1, 1
    page.type("#input", "Hello?" + ENTER)
    page.wait("document.querySelector('.message .error button')")
    assert "busy" in page.text(".message .error") and "Try again in" in page.text(".message .error button")
    queue.waiting, queue.taken = waiting, 0
    page.wait("!document.querySelector('.message .error button').disabled")
    page.click(".message .error button")
    page.wait("!document.querySelector('.message .error') && " + ANSWERED, 2)
    assert answers(page) == [say(served, "Hello?")]
    page.js("document.getElementById('input').value = 'long '.repeat(2000)")
    ask(page, "!", 4)
    assert "start a new chat" in page.text(".message .error")
    page.click("#new")
    page.js("window.fetch = async () => { throw new TypeError('failed to fetch') }")
    ask(page, "Hello?")
    assert "sojourn serve is running" in page.text(".message .error")


@pytest.mark.slow
def test_a_key_is_asked_for_and_kept_for_this_tab(page: Browser, served: Served, tmp_path: Path) -> None:
    choose(page)
    key = add_key(tmp_path / "keys.toml", "phone")
    served.gateway.keys = load_keys(tmp_path / "keys.toml", Quota())
    page.type("#input", "Hello?" + ENTER)
    page.wait("document.querySelector('#key[open]') && document.getElementById('key-error').hidden")
    page.type("#key-input", "not the key" + ENTER)
    page.wait("document.querySelector('#key[open]') && !document.getElementById('key-error').hidden")
    page.type("#key-input", key + ENTER)
    page.wait("!document.querySelector('.message .error') && " + ANSWERED, 2)
    assert (
        answers(page)
        and page.js("return Object.values(localStorage).some(one => one.includes(arguments[0]))", key) is False
    )
    open_url = served.url.replace("http://", f"http://me:{key}@")  # as the browser's own question does
    page.js("sessionStorage.clear()")
    page.open(open_url)
    page.wait("document.querySelectorAll('#model option').length")


@pytest.mark.slow
def test_a_conversation_is_saved_as_a_file_and_opened_again(page: Browser, folder: Path, served: Served) -> None:
    choose(page)
    ask(page, "What colour is the cat?")
    page.click(".assistant [title='Another answer']")
    page.wait(ANSWERED, 2)
    page.cdp("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    page.click("#export-json")
    page.click("#export-md")
    saved, text = folder / "what-colour-is-the-cat.json", folder / "what-colour-is-the-cat.md"
    wait_until(lambda: saved.exists() and text.exists())
    assert text.read_text().startswith("# What colour is the cat?\n\n## You\n\nWhat colour is the cat?\n\n## tiny\n\n")
    forget(page, served)
    show(page, served)
    page.type("#file", str(saved))
    page.wait("document.querySelectorAll('.message').length == 2")
    assert answers(page) == [say(served, "What colour is the cat?")] and page.text(".assistant .switch") == "2/2"
    cycle = {"a": {"parent": "b", "role": "user"}, "b": {"parent": "a", "role": "user"}}
    for wrong in (
        {"x": 1},
        [],
        None,
        {"messages": [{"role": "king"}]},
        {"format": "sojourn-chat", "conversation": {"nodes": cycle}},
    ):
        page.js("document.getElementById('notice').hidden = true")
        open_file(page, folder, wrong)
        page.wait("!document.getElementById('notice').hidden")
        assert "opened.json cannot be opened" in page.text("#notice")
    assert page.count(".chat") == 1


@pytest.mark.slow
def test_languages_themes_and_a_phone(page: Browser, served: Served) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = page.js(ground)
    page.dark(True)
    assert page.js(ground) != light
    choose(page)
    page.click("#settings-open")
    change(page, "theme", "light")
    change(page, "language", "zh")
    assert page.js(ground) == light and page.text("#settings-title") == "设置"
    page.keys(ESCAPE)
    show(page, served)
    assert page.js("return document.documentElement.lang") == "zh-CN" and page.js(ground) == light
    ask(page, "猫是什么颜色的？")
    page.size(360, 740)
    assert page.js("return document.documentElement.scrollWidth") == 360
    page.click("#menu")
    time.sleep(0.3)  # it slides in
    assert page.text(".chat .open") == "猫是什么颜色的？"
    page.keys(ESCAPE)
    page.click("#settings-open")
    box = page.js(
        "const box = document.getElementById('settings').getBoundingClientRect(); return [box.left, box.right]"
    )
    assert 0 <= box[0] < box[1] <= 360
    unnamed = (
        "return [...document.querySelectorAll('button, select, input:not([hidden]), textarea')]"
        ".filter(one => !(one.ariaLabel || one.textContent || one.labels?.length)).map(one => one.id)"
    )
    page.keys(ESCAPE)
    assert page.js(unnamed) == [] and page.log() == []
