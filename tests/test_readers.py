"""Files are found in one order everywhere and read as chunks: exact lines, flat memory, or one line that refuses."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import pickle
import random
import tracemalloc
import unicodedata
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from conftest import ordinary_user
from shared import MORE
from sojourn.data.sources import json_values, tables, texts
from sojourn.data.sources.files import find_files
from sojourn.data.sources.readers import read_file
from sojourn.errors import UserError

SIZES = st.one_of(st.integers(1, 40), st.sampled_from([100, 4096, 1 << 20]))
over_contents = settings(
    max_examples=12 * MORE, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def write(path: Path, content: bytes | str) -> Path:
    """The file with this content, packed as its name says."""
    data = content.encode() if isinstance(content, str) else content
    if path.suffix == ".gz":
        data = gzip.compress(data)
    if path.suffix == ".zst":
        data = pyarrow.Codec("zstd").compress(data, asbytes=True)
    path.write_bytes(data)
    return path


def read(path: Path, size: int = 1 << 20) -> list[tuple[int, Any]]:
    found = []
    for chunk in read_file(path, size):
        assert chunk.file == str(path)
        assert len(chunk.lines) == len(chunk.records) > 0
        found += zip(chunk.lines, chunk.records, strict=True)
    return found


def refusal(path: Path, size: int = 1 << 20) -> str:
    with pytest.raises(UserError) as caught:
        read(path, size)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(str(path), path.name)


# Finding


def test_a_folder_gives_its_known_files_in_one_order_and_no_hidden_ones(tmp_path: Path) -> None:
    wanted = ["B.TXT", "a/deep/x.jsonl.gz", "a/é.md", "a.csv", "b.parquet", "c.json.ZST", "d.tsv", "e.ndjson"]
    ignored = [".hidden.txt", ".git/x.txt", "a/.cache/y.json", "notes.docx", "f.parquet.gz", "noending", "x.gz"]
    for name in wanted + ignored:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    found = [file.relative_to(tmp_path).as_posix() for file in find_files(str(tmp_path))]
    assert found == sorted(wanted)


def test_a_decomposed_name_sorts_where_the_composed_one_would(tmp_path: Path) -> None:
    names = ["e.txt", unicodedata.normalize("NFD", "é.txt"), "z.txt", "ê.txt"]
    for name in names:
        (tmp_path / name).write_bytes(b"")
    found = [unicodedata.normalize("NFC", file.name) for file in find_files(str(tmp_path))]
    assert found == ["e.txt", "z.txt", "é.txt", "ê.txt"]


def test_a_hidden_folder_may_itself_be_the_source(tmp_path: Path) -> None:
    folder = tmp_path / ".data"
    folder.mkdir()
    write(folder / "a.txt", "x")
    assert find_files(str(folder)) == [folder / "a.txt"]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.txt", ["top.txt"]),
        ("**/*.txt", ["a/b/two.txt", "a/one.txt", "top.txt"]),
        ("**", ["a/b/two.txt", "a/one.json", "a/one.txt", "top.txt"]),
        ("a/**", ["a/b/two.txt", "a/one.json", "a/one.txt"]),
        ("a/*", ["a/one.json", "a/one.txt"]),
        ("?/[no]*.json", ["a/one.json"]),
        ("*/../a/o*.txt", ["a/../a/one.txt"]),
    ],
)
def test_globs_mean_the_same_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, names: list[str]
) -> None:
    for name in ("top.txt", "a/one.txt", "a/one.json", "a/one.bin", "a/b/two.txt", "a/.hide.txt", ".h/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert find_files(f"{tmp_path}/{pattern}") == [tmp_path / name for name in names]
    monkeypatch.chdir(tmp_path)
    assert find_files(pattern) == [Path(name) for name in names]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_files(f"~/{pattern}") == [tmp_path / name for name in names]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path: Path) -> None:
    assert find_files(str(write(tmp_path / "a[1].txt", "x"))) == [tmp_path / "a[1].txt"]


def test_links_that_lead_round_in_a_circle_are_followed_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write(tmp_path / "a" / "x.txt", "x")
    for name in ("loop", "again"):
        (tmp_path / "a" / name).symlink_to(tmp_path)
    (tmp_path / "a" / "gone.txt").symlink_to(tmp_path / "nothing")
    assert find_files(str(tmp_path)) == [tmp_path / "a" / "x.txt"]
    assert find_files(f"{tmp_path}/**/*.txt") == [tmp_path / "a" / "x.txt"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing.txt", "no such file or folder"),
        ("gone.txt", "broken link"),
        ("self.txt", ""),
        ("book.docx", "save it as text or CSV; supported: .txt"),
        ("x.bin", ".bin files cannot be read; supported: .txt"),
        ("noending", "files without an extension cannot be read"),
        ("x.parquet.gz", "cannot be read"),
        ("empty", "no file that can be read; supported: .txt"),
        ("*.xyz", "no file that can be read"),
        ("nowhere/*.txt", "no file that can be read"),
        ("pipe.txt", "not an ordinary file"),
        ("nul\0.txt", "data.sources"),
        ("x" * 5000, "cannot be read"),
    ],
)
def test_a_missing_file_is_reported_in_one_line(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nothing")
    (tmp_path / "self.txt").symlink_to(tmp_path / "self.txt")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe.txt")
    for file in ("book.docx", "x.bin", "noending", "x.parquet.gz"):
        write(tmp_path / file, "x")
    with pytest.raises(UserError, match=r"data\.sources") as caught:
        find_files(f"{tmp_path}/{name}")
    assert message in str(caught.value)


def test_an_unreadable_file_is_reported() -> None:
    with ordinary_user() as place:
        folder, file = place / "closed", write(place / "closed.txt", "x")
        folder.mkdir()
        folder.chmod(0)
        file.chmod(0)
        with pytest.raises(UserError, match="cannot be read: Permission denied"):
            find_files(str(place))
        assert refusal(file) == "closed.txt: cannot be read: Permission denied"
        folder.chmod(0o700)


# Compression


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
@pytest.mark.parametrize(
    ("name", "content", "records"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": 2}\n', [b'{"a": 1}', b'{"a": 2}']),
        ("a.NDJSON", '{"a": 1}', [b'{"a": 1}']),
        ("a.json", "[1, 2]", [b"1", b"2"]),
        ("a.csv", "a,b\n1,2\n", [{"a": "1", "b": "2"}]),
        ("a.tsv", "a\tb\n1,5\t2\n", [{"a": "1,5", "b": "2"}]),
        ("a.txt", "one\n\ntwo\n", [b"one\n\ntwo"]),
        ("a.md", "# one", [b"# one"]),
    ],
)
def test_every_kind_is_read_packed_or_not(
    tmp_path: Path, packing: str, name: str, content: str, records: list[Any]
) -> None:
    for start in ("", "\ufeff"):
        path = write(tmp_path / f"{name}{packing}", start + content)
        assert find_files(str(path)) == [path]
        assert [record for _, record in read(path)] == records


def test_parts_packed_one_by_one_and_joined_are_read_as_one(tmp_path: Path) -> None:
    for name in ("a.jsonl.gz", "a.jsonl.zst"):
        path = write(tmp_path / name, "1\n")
        path.write_bytes(path.read_bytes() * 3)
        assert read(path) == [(1, b"1"), (2, b"1"), (3, b"1")]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.gz", "a.json.zst", "a.csv.gz"])
def test_damaged_compression_is_reported_with_the_approximate_line(tmp_path: Path, name: str) -> None:
    rows = "".join(f'"{os.urandom(60).hex()}"\n' for _ in range(5000))
    path = write(tmp_path / name, rows)
    data = path.read_bytes()
    for broken in (data[: len(data) * 2 // 3], b"\0" * 100, data[:-4], data + b"rubbish at the end"):
        path.write_bytes(broken)
        message = refusal(path, 10_000)
        assert message.startswith(f"{name}:")
        assert "copy or download it again" in message
    path.write_bytes(data[: len(data) * 2 // 3])
    if "jsonl" in name:
        assert 2000 < int(refusal(path, 10_000).split(":")[1]) < 3400


# JSON lines


def test_json_lines_keep_their_numbers_over_blank_lines_and_crlf(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf\n{"a":1}\r\n \r\n\n  {"b":2}\n{"c":3}\r')
    for size in (1, 5, 1000):
        assert read(path, size) == [(2, b'{"a":1}'), (5, b'  {"b":2}'), (6, b'{"c":3}')]


def test_lines_without_gaps_are_numbered_by_a_range_and_parcels_travel(tmp_path: Path) -> None:
    (chunk,) = read_file(write(tmp_path / "a.jsonl", "1\n2\n3\n"))
    assert chunk.lines == range(1, 4)
    assert pickle.loads(pickle.dumps(chunk)) == chunk  # noqa: S301


def test_bad_json_lines_are_left_to_the_consumer(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.jsonl", b'{"a"\n\xff\xfe\n')) == [(1, b'{"a"'), (2, b"\xff\xfe")]


def test_an_endless_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "MAX_VALUE_BYTES", 1000)
    monkeypatch.setattr(json_values, "MAX_VALUE_BYTES", 1000)
    for name in ("a.jsonl", "a.csv"):
        assert refusal(write(tmp_path / name, "1\n" + "2" * 2000), 100).startswith(f"{name}:2: a line of more than")
    assert "a.json:2: not valid JSON: a value of more" in refusal(write(tmp_path / "a.json", "[\n" + "2" * 2000), 100)


@given(st.lists(st.sampled_from([b"", b" ", b"\r", b'{"a": "\xc3\xa9"}', b"12", b"x" * 30]), max_size=20), SIZES)
@over_contents
def test_json_lines_do_not_depend_on_the_size_of_parcels(tmp_path: Path, lines: list[bytes], size: int) -> None:
    path = write(tmp_path / "a.jsonl", b"\n".join(lines))
    assert read(path, size) == [(n, line.rstrip(b"\r")) for n, line in enumerate(lines, 1) if line.strip()]


# JSON


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(VALUES, max_size=8), SIZES, st.sampled_from([None, 0, 2]), st.booleans())
@over_contents
def test_a_list_gives_its_elements_whatever_the_size_of_parcels(
    tmp_path: Path, values: list[Any], size: int, indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(values, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    path = write(tmp_path / "a.json", text)
    if b"\xed\xa0" in text:
        return
    found = read(path, size)
    assert [json.dumps(json.loads(record)) for _, record in found] == [json.dumps(value) for value in values]
    lines = text.split(b"\n")
    for line, record in found:
        assert lines[line - 1].strip().startswith(record.split(b"\n")[0]) or indent is None


@given(
    st.lists(VALUES.filter(lambda value: not isinstance(value, list)), max_size=6),
    SIZES,
    st.sampled_from(["\n", " \n\n "]),
)
@over_contents
def test_values_one_after_another_are_read_whatever_the_size_of_parcels(
    tmp_path: Path, values: list[Any], size: int, between: str
) -> None:
    values = [{"the first line": "is no value"}, *values]
    path = write(tmp_path / "a.json", between.join(json.dumps(value, indent=1) for value in values))
    assert [json.dumps(json.loads(record)) for _, record in read(path, size)] == [json.dumps(v) for v in values]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_elements_of_a_printed_list_have_the_line_where_they_start(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, '\n[\r\n  {\r\n    "a": 1\r\n  },\r\n\r\n  2 ,3\r\n  , [\r\n4]\r\n]\r\n')
    for size in (1, 7, 1000):
        assert read(path, size) == [(3, b'{\r\n    "a": 1\r\n  }'), (7, b"2"), (7, b"3"), (8, b"[\r\n4]")]


@pytest.mark.parametrize(
    ("content", "records"),
    [
        ("", []),
        (" \n\n", []),
        ("[]", []),
        (" [ \n ] \n", []),
        ('{"a": [1]}', [(1, b'{"a": [1]}')]),
        ('{"a": 1}\n{"b": 2}\n', [(1, b'{"a": 1}'), (2, b'{"b": 2}')]),
        ('\n{"a": 1}\r\n\n{"b"\n', [(2, b'{"a": 1}'), (4, b'{"b"')]),
        ('{\n"a": 1}{"b": 2}\n\n3', [(1, b'{\n"a": 1}'), (2, b'{"b": 2}'), (4, b"3")]),
        ("[NaN, -Infinity, 1.5e+10]", [(1, b"NaN"), (1, b"-Infinity"), (1, b"1.5e+10")]),
        ("[-0.25, true, null]", [(1, b"-0.25"), (1, b"true"), (1, b"null")]),
    ],
)  # fmt: skip
def test_a_json_file_may_hold_a_list_a_value_or_lines(tmp_path: Path, content: str, records: list[Any]) -> None:
    for size in (1, 2, 3, 1000):
        assert read(write(tmp_path / "a.json", content), size) == records


def test_elements_larger_than_any_buffer_are_read_in_good_time(tmp_path: Path) -> None:
    values = ["é" * 3_000_000, list(range(200_000)), 1]
    path = write(tmp_path / "a.json", json.dumps(values, ensure_ascii=False))
    assert [json.loads(record) for _, record in read(path, 5000)] == values


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[\n1,\n{"a" 2}]', "a.json:3: not valid JSON: Expecting ':' delimiter"),
        (b"[1,\n2\n3]", "a.json:3: not valid JSON: expected “,” or “]”"),
        (b"[1,\n]", "a.json:2: not valid JSON"),
        (b"[1,\n2", "a.json:2: not valid JSON: the file ends in the middle"),
        (b'[1,\n{"a": "xy', "a.json:2: not valid JSON: the file ends in the middle"),
        (b'[1,\n{"a": \n', "a.json:2: not valid JSON: the file ends in the middle"),
        (b"[", "a.json:1: not valid JSON: the file ends in the middle"),
        (b"[1]\n[2]", "a.json:2: not valid JSON: text after the end of the list"),
        (b'{\n"a": 1\n', "a.json:2: not valid JSON: the file ends in the middle"),
        (b'{\n"a": x}', "a.json:2: not valid JSON: Expecting value"),
        (b"rubbish", "a.json:1: not valid JSON"),
        (b'[1,\n\n"\xff"]', "a.json:3: not UTF-8 text"),
        (b'[1,\n"\xe4\xbd', "a.json:2: not UTF-8 text"),
        (b"[1,\n" + b"[" * 200_000, "a.json:2: not valid JSON: nested too deep"),
        (b'{"a":\n' + b"[" * 200_000, "a.json:1: not valid JSON: nested too deep"),
        (b"[1,\n" + b"7" * 5000 + b"]", "a.json:2: not valid JSON"),
        ("[1]".encode("utf-16"), "a.json:1: UTF-16 text; save it as UTF-8"),
    ],
)
def test_invalid_json_is_reported_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    for size in (1, 64, 1 << 20) if len(content) < 1000 else (1 << 20,):
        assert refusal(write(tmp_path / "a.json", content), size).startswith(message)


@pytest.mark.parametrize("name", ["a.json", "a.csv"])
def test_what_is_not_utf8_gets_the_same_advice_however_it_is_read(tmp_path: Path, name: str) -> None:
    few = write(tmp_path / name, b"[1\n" + "模型训练".encode("gbk"))
    late = write(tmp_path / f"late-{name}", b"[1\n" + "型".encode("gbk") + b"x" * 999 + "模型训练".encode("gbk"))
    for size in (1, 2, 5, 1 << 20):
        assert refusal(few, size).endswith("convert it with data.encoding=gbk")
        assert refusal(late, size).endswith("save it as UTF-8")  # one Chinese character is no sign


@given(st.binary(max_size=60) | st.text('[]{}",:1 \n\\eE.-tru', max_size=40).map(str.encode), SIZES)
@settings(over_contents, max_examples=30 * MORE)
def test_no_bytes_at_all_bring_a_reader_down(tmp_path: Path, content: bytes, size: int) -> None:
    for name in ("a.json", "a.jsonl", "a.csv", "a.txt", "a.parquet"):
        path = write(tmp_path / name, content)
        results = []
        for one in (size, 1 << 20):
            try:
                results.append(repr(read(path, one)))
            except UserError as error:
                results.append(str(error))
        assert results[0] == results[1]


# Tables


def test_rows_have_the_line_where_they_start(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.csv", '\ufeff\n id ,text\r\n\r\n1,"two\r\nlines, ""one"" row"\r\n\n2,b\n3\n4,x,y,z\n  \n5,'
    )
    for size in (1, 9, 1000):
        assert read(path, size) == [
            (4, {"id": "1", "text": 'two\nlines, "one" row'}),
            (7, {"id": "2", "text": "b"}),
            (8, ["3"]),
            (9, ["4", "x", "y", "z"]),
            (11, {"id": "5", "text": ""}),
        ]


@pytest.mark.parametrize("sign", [",", ";", "\t"])
def test_the_separator_is_seen_in_the_header(tmp_path: Path, sign: str) -> None:
    assert read(write(tmp_path / "a.csv", f"a{sign}b\n1{sign}2")) == [(2, {"a": "1", "b": "2"})]
    assert read(write(tmp_path / "b.csv", "text\na;b\n")) == [(2, {"text": "a;b"})]


def test_a_long_cell_is_no_trouble(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.csv", f"a\n{'x' * 500_000}")) == [(2, {"a": "x" * 500_000})]


CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=8)


@given(st.lists(st.tuples(CELLS, CELLS), max_size=8), SIZES)
@over_contents
def test_a_table_comes_back_as_it_was_written(tmp_path: Path, rows: list[tuple[str, str]], size: int) -> None:
    out = io.StringIO(newline="")
    csv.writer(out).writerows([("a", "b"), *rows])
    found = read(write(tmp_path / "a.csv", out.getvalue()), size)
    assert [tuple(record.values()) for _, record in found] == rows


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,,c\n1,2,3", "a.csv:1: column 2 has no name"),
        (b"\na,b, a\n1,2,3", "a.csv:2: two columns are named “a”"),
        (b"a\n1\n\xff\n", "a.csv:3: not UTF-8 text"),
        (b"a\r1\r\n2\0\n", "a.csv:3: a NUL character"),
        (b'a,b\n1,2\n3,"x\n4,5\n6,7\n', "a.csv:3: a quote in this row is never closed"),
        ("a\n1".encode("utf-16-le"), "a.csv:1: a NUL character"),
        ("\ufeffa\n1".encode("utf-16-be"), "a.csv:1: UTF-16 text; save it as UTF-8"),
    ],
)
def test_an_invalid_table_is_reported_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    for size in (1, 1 << 20):
        assert refusal(write(tmp_path / "a.csv", content), size).startswith(message)


def test_a_cell_that_is_too_long_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_MAX_FIELD_CHARACTERS", 100)
    assert refusal(write(tmp_path / "a.csv", f"a\n1\n{'x' * 200}")).startswith("a.csv:3: not a valid row")


def test_an_empty_table_holds_nothing(tmp_path: Path) -> None:
    for content in ("", "\n\n", "a,b\n", "a,b\n\n"):
        assert read(write(tmp_path / "a.csv", content)) == []


# Parquet


def test_parquet_rows_are_numbered_and_parcels_stay_small(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = [{"id": i, "text": "x" * 1000 if i < 500 else "y", "chat": [{"role": "user"}]} for i in range(1500)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=400)
    assert read(path) == read(path, 1) == list(enumerate(rows, 1))
    chunks = list(read_file(path, 20_000))
    assert chunks[0].lines == range(1, len(chunks[0].records) + 1)
    assert max(sum(len(row["text"]) for row in chunk.records) for chunk in chunks) < 60_000


def test_parquet_text_repeated_by_a_dictionary_does_not_swell_a_parcel(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["x" * 10_000] * 3000}), path)
    assert max(len(chunk.records) for chunk in read_file(path, 100_000)) <= 20


def test_damaged_parquet_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    dice = random.Random(0)
    parquet.write_table(pyarrow.table({"text": [dice.randbytes(50).hex() for _ in range(20_000)]}), path)
    data = path.read_bytes()
    for broken in (
        b"",
        b"PAR1",
        data[: len(data) // 2],
        data[: len(data) // 2] + b"\xff" * 5000 + data[len(data) // 2 + 5000 :],
    ):
        path.write_bytes(broken)
        assert "damaged parquet file from this row on" in refusal(path)
    twins = pyarrow.table([[1], [2]], names=["a", "a"])
    parquet.write_table(twins, path)
    assert "two columns are named “a”" in refusal(path)


# Text


def test_short_paragraphs_are_one_document(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "\ufeff\r\n\r\n  one\r\ntwo\r\rthree \n\n")
    assert read(path) == [(3, b"one\ntwo\n\nthree")]


def test_a_document_ends_at_a_blank_line_once_it_is_long_enough(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "a" * 3999 + "\n\n" + "b" * 10 + "\n \t\n\n\nc\n\nd")
    assert read(path) == [(1, b"a" * 3999 + b"\n\n" + b"b" * 10), (7, b"c\n\nd")]
    assert len(read(write(tmp_path / "b.txt", "a" * 3999 + "\n\nb"))) == 1
    assert len(read(write(tmp_path / "b.txt", "a" * 4000 + "\n\nb"))) == 2


def test_end_of_text_ends_a_document_wherever_it_stands(tmp_path: Path) -> None:
    text = "one\n<|endoftext|>\n\ntwo<|endoftext|>three\nfour\n<|endoftext|><|endoftext|>\n"
    for size in (1, 10, 1000):
        found = read(write(tmp_path / "a.txt", text), size)
        assert found == [(1, b"one"), (4, b"two"), (4, b"three\nfour")]


def test_an_article_begins_with_its_heading(tmp_path: Path) -> None:
    text = (
        " \n = One = \n \n text \n \n = = Part = = \n more\n = Two of them = \n text\n= Three =\nx = y = z\n = End = "
    )
    assert [record.split(b"\n")[0].strip() for _, record in read(write(tmp_path / "a.txt", text))] == [
        b"= One =", b"= Two of them =", b"= Three =", b"= End =",
    ]  # fmt: skip
    assert [line for line, _ in read(tmp_path / "a.txt")] == [2, 8, 10, 12]


def test_text_without_blank_lines_is_cut_at_a_line(tmp_path: Path) -> None:
    text = b"a line of words\n" * 200_000
    found = read(write(tmp_path / "a.txt", text))
    assert b"\n".join(record for _, record in found) + b"\n" == text
    assert all(900_000 < len(record) <= 1 << 20 for _, record in found[:-1])
    assert [line for line, _ in found[:2]] == [1, 1 + found[0][1].count(b"\n") + 1]


@pytest.mark.parametrize("sign", ["x", "é", "汉", "𝄞"])
def test_a_giant_line_is_cut_between_characters(tmp_path: Path, sign: str) -> None:
    text = ("x" + sign * (3_000_000 // len(sign.encode()))).encode()
    found = read(write(tmp_path / "a.txt", text), 1000)
    assert b"".join(record for _, record in found) == text
    assert all(record.decode() and len(record) <= 1 << 20 for _, record in found)
    assert {line for line, _ in found} == {1}


def test_bytes_that_are_not_utf8_stay_for_the_consumer(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.txt", b"a\xff\x80b")) == [(1, b"a\xff\x80b")]
    assert b"".join(record for _, record in read(write(tmp_path / "a.txt", b"\x80" * 2_500_000))) == b"\x80" * 2_500_000


PIECES = [
    b"\n",
    b"\n\n",
    b"\r\n",
    b"\r",
    b" ",
    b"word",
    "é汉".encode(),
    b"<|endoftext|>",
    b"\n = Title = \n",
    b"w" * 30,
]


@given(st.lists(st.sampled_from(PIECES), max_size=60), SIZES)
@settings(over_contents, max_examples=30 * MORE)
def test_documents_do_not_depend_on_the_size_of_parcels(tmp_path: Path, pieces: list[bytes], size: int) -> None:
    path = write(tmp_path / "a.txt", b"".join(pieces))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "_MIN_DOCUMENT_BYTES", 20)
        patch.setattr(texts, "_MAX_DOCUMENT_BYTES", 64)
        found = read(path, size)
        assert found == read(path)
    text = path.read_bytes().replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    lines = text.split(b"\n")
    for line, record in found:
        assert record.split(b"\n")[0] in lines[line - 1]
    kept = b"".join(b"".join(record.split()) for _, record in found)
    assert kept == b"".join(text.replace(b"<|endoftext|>", b"").split())


# Memory


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.jsonl.gz", "one-line.json"])
def test_memory_stays_flat_however_big_the_file(tmp_path: Path, name: str) -> None:
    record = json.dumps({"text": "some words " * 60})
    if name.endswith("json"):
        comma = ", " if name.startswith("one") else ",\n"
        content = f"[{comma.join([record] * 30_000)}]"
    elif name == "a.csv":
        content = "text\n" + "some words " * 60 + ("\n" + "some words " * 60) * 30_000
    else:
        content = f"{record}\n" * 30_000
    path = write(tmp_path / name, content)
    assert len(content) > 18_000_000
    del content
    tracemalloc.start()
    try:
        count = sum(len(chunk.records) for chunk in read_file(path, 1 << 18))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count >= 18
    assert peak < 8_000_000
