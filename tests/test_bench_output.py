"""What `moestream bench` puts out: llama-bench's formats with our columns behind, and the report."""

from __future__ import annotations

import csv
import html
import importlib.machinery
import importlib.util
import io
import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench_records import GIB, MACHINE, cache_sizes, killed, record, sweep
from moestream import OptionError, OutputError
from moestream.bench import _figures, _frame
from moestream.bench.record import FLAT, LLAMA_BENCH_KEYS, OUR_KEYS, read_records, whole_record
from moestream.bench.report import write_report
from moestream.bench.writers import writer

# llama-bench's fields, from its test::get_fields() and get_field_type() of llama.cpp as of llama-cpp-python 0.3.36.
THEIRS = """
build_commit build_number cpu_info gpu_info backends model_filename model_type model_size model_n_params n_batch n_ubatch n_threads
cpu_mask cpu_strict poll type_k type_v n_gpu_layers n_cpu_moe split_mode main_gpu no_kv_offload flash_attn devices tensor_split
tensor_buft_overrides load_mode lazy_mode embeddings no_op_offload no_host repack fit_target fit_min_ctx n_prompt n_gen n_depth
test_time avg_ns stddev_ns avg_ts stddev_ts
""".split()
BOOLS = {"cpu_strict", "no_kv_offload", "embeddings", "no_host", "repack"}
INTS = set(
    "build_number n_batch n_ubatch n_threads poll model_size model_n_params n_gpu_layers main_gpu n_prompt n_gen n_depth avg_ns"
    " stddev_ns no_op_offload n_cpu_moe fit_target fit_min_ctx flash_attn".split()
)
FLOATS = {"avg_ts", "stddev_ts"}


def written(format: str, records: list[dict[str, Any]]) -> str:
    stream = io.StringIO()
    with writer(format, stream) as out:  # type: ignore[arg-type]
        for one in records:
            out.record(one)
    return stream.getvalue()


# What a program reads


def test_the_keys_are_llama_benchs_and_then_ours() -> None:
    assert list(LLAMA_BENCH_KEYS) == [*THEIRS, "samples_ns", "samples_ts"]
    (found,) = json.loads(written("json", [record(tokens=9)]))
    assert list(found) == [*LLAMA_BENCH_KEYS, *OUR_KEYS]


def test_json_values_have_llama_benchs_types() -> None:
    # As a careless caller may hand them over.
    careless = record(tokens=9, cpu_strict=0, repack=1, avg_ns=1234.4, no_op_offload=False, avg_ts=7)
    (found,) = json.loads(written("json", [careless]))
    for key in THEIRS:
        expected = bool if key in BOOLS else int if key in INTS else float if key in FLOATS else str
        assert type(found[key]) is expected, key
    assert found["avg_ns"] == 1234
    assert all(type(ns) is int for ns in found["samples_ns"])


@pytest.mark.parametrize("format", ["json", "jsonl"])
def test_records_come_back_as_they_were(format: str, tmp_path: Path) -> None:
    records = [record(tokens=9, arm='a "b" \\ \n é'), killed(), record(tokens=9, newer_key=[1, {"x": None}])]
    path = tmp_path / "records"
    path.write_text(written(format, records))
    assert read_records(path) == [whole_record(r) for r in records]
    assert read_records(path)[2]["newer_key"] == [1, {"x": None}]


def test_what_json_cannot_say_is_null() -> None:
    odd = record(tokens=9, drift=float("nan"), limit_ts=float("inf"), machine={"load": float("nan")})
    found = json.loads(written("jsonl", [odd]), parse_constant=lambda name: pytest.fail(name))
    assert (found["drift"], found["limit_ts"], found["machine"]["load"]) == (None, None, None)


def test_csv_is_read_by_what_reads_llama_benchs() -> None:
    tricky = record(tokens=9, arm='a,"b"', warnings=["one", "two; three"])
    text = written("csv", [tricky, killed()])
    first, second = csv.DictReader(io.StringIO(text))
    assert text.splitlines()[0].split(",")[: len(THEIRS)] == THEIRS
    assert list(first) == list(FLAT)
    assert first["arm"] == 'a,"b"' and first["warnings"] == "one; two; three"
    assert first["repack"] == "1" and first["cpu_strict"] == "0"
    assert re.fullmatch(r"\d+\.\d{6}", first["avg_ts"]) and first["n_gen"] == "9"
    assert float(first["p50_ms"]) == tricky["p50_ms"]
    # Quoted all, as llama-bench does, so that nothing known is told apart from nothing there.
    assert text.splitlines()[1].startswith('"b1d2e3f","9999","AMD EPYC 9R14","","CPU",')
    assert second["avg_ts"] == "" and ',"2026-05-04T11:57:09Z",,,,,"stock-none",' in text


def test_sql_makes_llama_benchs_table_and_fills_it() -> None:
    tricky = record("stream-it's", tokens=9, warnings=["a'b"])
    text = written("sql", [tricky, killed()])
    database = sqlite3.connect(":memory:")
    database.executescript(text)
    columns = {name: kind for _, name, kind, *_ in database.execute("pragma table_info(llama_bench)")}
    rows = [dict(zip(columns, row, strict=True)) for row in database.execute("select * from llama_bench")]
    database.close()
    assert list(columns) == list(FLAT) and list(columns)[: len(THEIRS)] == THEIRS
    for key in THEIRS:
        assert columns[key] == ("INTEGER" if key in BOOLS | INTS else "REAL" if key in FLOATS else "TEXT"), key
    assert rows[0]["arm"] == "stream-it's" and rows[0]["warnings"] == "a'b"
    assert rows[0]["n_gen"] == 9 and rows[0]["repack"] == 1 and rows[0]["hit_rate"] == 0.62
    assert rows[1]["avg_ts"] is None and rows[1]["oom_kills"] == 1


@pytest.mark.parametrize("format", ["csv", "json", "jsonl", "sql"])
def test_a_record_is_in_the_stream_as_soon_as_it_is_finished(format: str) -> None:
    stream = io.StringIO()
    out = writer(format, stream)  # type: ignore[arg-type]
    out.record(record(tokens=9, arm="first-arm"))
    assert "first-arm" in stream.getvalue()
    out.close()


def test_what_was_interrupted_is_whole() -> None:
    stream = io.StringIO()
    with pytest.raises(KeyboardInterrupt), writer("json", stream) as out:
        out.record(record(tokens=9))
        raise KeyboardInterrupt
    out.close()  # a second time, which is nothing
    assert len(json.loads(stream.getvalue())) == 1
    assert json.loads(written("json", [])) == []


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(OptionError, match="output format 'xml': expected one of md, csv, json, jsonl, sql"):
        writer("xml", io.StringIO())  # type: ignore[arg-type]


# What is no file of records


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no records: a file of records is what `moestream bench -o json`"),
        ("[]", "has no records"),
        ("[1]", "record 1 is not an object"),
        ('{"a": 1}\n{"a": ', "line 2 is not JSON"),
        ("model,size\n", "line 1 is not JSON"),
        ("[" * 100_000, "line 1 is not JSON"),
        ('{"model_filename": "m"}', "record 1 has no 'n_prompt'"),
        (
            json.dumps([{k: v for k, v in record(tokens=1).items() if k in THEIRS}]),
            "is of llama-bench itself, without arm and",
        ),
        (
            json.dumps([record(tokens=1), record(tokens=1, avg_ts="7")]),
            "record 2 has 'avg_ts' = \"7\": expected a number",
        ),
        (json.dumps([record(tokens=1, avg_ts=float("nan"))]), "has 'avg_ts' = NaN: expected a number"),
        (json.dumps([record(tokens=1, warnings="busy")]), "has 'warnings' = \"busy\": expected a list of texts"),
        (
            json.dumps([record(tokens=1, token_ns=[[0]])]),
            r"has 'token_ns' = \[\[0\]\]: expected a list of lists of numbers above 0",
        ),
        (json.dumps([record(tokens=1, outcome=None)]), "has 'outcome' = null: expected text"),
        (json.dumps([record(tokens=1, machine={"versions": 3})]), r"has machine\['versions'\] = 3: expected an object"),
    ],
    ids=lambda text: text[:30],
)
def test_a_file_of_something_else_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(content)
    with pytest.raises(OptionError, match=message) as caught:
        read_records(tmp_path / "file.json")
    assert "file.json" in str(caught.value)


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="absent.json: cannot be read: No such file"):
        read_records(tmp_path / "absent.json")
    (tmp_path / "binary").write_bytes(b"GGUF\xff\xfe")
    with pytest.raises(OptionError, match="binary: is not text"):
        read_records(tmp_path / "binary")


# What people read


def table_of(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines() if line.startswith("|")
    ]


def test_the_table_has_llama_benchs_look() -> None:
    text = written("md", [record(), killed(), record(depth=512)])
    heading, rule, first, second, third = table_of(text)
    assert heading == ["arm", "test", "t/s", "hits", "p95 ms", "RSS / on disk", "limit"]
    assert rule[0].strip("-") == "" and rule[2].endswith("-:")
    assert first[:2] == ["stream-prefetch", "tg256"] and third[1] == "tg256 @ d512"
    assert re.fullmatch(r"\d+\.\d\d ± \d+\.\d\d", first[2])
    assert second[2] == "killed: out of memory"
    assert first[5] == "3.7/16.0 GiB"
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1
    assert text.endswith("build: b1d2e3f (9999)\n")


def test_conditions_are_columns_only_where_they_vary() -> None:
    same = written("md", [record(), record("stock-mmap")])
    assert same.startswith(
        "qwen3moe 30B.A3B Q4_0, 16.04 GiB, 30.53 B parameters, CPU, 2 threads, text: demo corpus, memory: 4 GiB"
    )
    assert (
        "AMD EPYC 9R14, 2 cores, 15 GiB of memory, virtual machine (kvm); disk nvme0n1 ext4, read at 2.48 to 2.51 GB/s"
        in same
    )
    varied = table_of(
        written("md", [record(), record(n_threads=1, n_ubatch=64, memory=None, disk_bps_limit=500_000_000)])
    )
    assert varied[0][:4] == ["threads", "n_ubatch", "memory", "disk"]
    assert varied[2][:4] == ["2", "512", "4 GiB", "as it is"] and varied[3][:4] == ["1", "64", "no limit", "500 MB/s"]


def test_tables_fit_a_terminal() -> None:
    for records in (sweep(), cache_sizes()):
        assert max(map(len, written("md", records).splitlines())) <= 120


def test_a_bar_in_a_name_does_not_make_a_column() -> None:
    assert r"| a\|b" in written("md", [record("a|b")])


def test_warnings_stand_below_the_table_once_with_their_arms() -> None:
    busy = ["other processes used 31% of a core"]
    text = written("md", [record("a", warnings=busy), record("b", warnings=busy, depth=9), record("c"), killed("d")])
    assert text.count("31% of a core") == 1
    assert "- warning: other processes used 31% of a core (a, b)\n" in text
    assert "- warning: killed by the system: it needs more memory than its limit of 4 GiB (d)\n" in text
    everyone = written("md", [record("a", warnings=busy), record("b", warnings=busy)])
    assert "- warning: other processes used 31% of a core\n" in everyone


def test_what_was_too_slow_or_failed_says_so_in_its_speed() -> None:
    records = [record(speed=2, outcome="too slow"), record(outcome="failed"), killed(avg_ts=3.0)]
    cells = [row[2] for row in table_of(written("md", records))[2:]]
    assert re.fullmatch(r"cut short: [12]\.\d\d", cells[0])
    assert cells[1:] == ["failed", "killed: out of memory"]


# The report


class Page(HTMLParser):
    """What a page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attributes if name == "id"]
        self.links += [value or "" for name, value in attributes if name in ("href", "src", "xlink:href")]


def reported(records: list[dict[str, Any]], tmp_path: Path, **options: Any) -> str:
    write_report(records, tmp_path / "report.html", **options)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html"]
    return (tmp_path / "report.html").read_text()


def figures_of(page: str) -> dict[str, str]:
    """The words of each picture, by its title."""
    found = {}
    for title, drawing in re.findall(r'<figure role="img" aria-label="([^"]*)">(.*?)</figure>', page, re.DOTALL):
        found[title] = html.unescape(" ".join(re.findall(r"<text[^>]*>([^<]*)", drawing)))
    return found


@pytest.fixture(scope="module")
def whole_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return reported(sweep(), tmp_path_factory.mktemp("report"))


def test_the_page_needs_nothing_from_elsewhere(whole_page: str) -> None:
    page = Page(whole_page)
    assert all(link.startswith("#") for link in page.links)
    assert "script" not in page.tags and "link" not in page.tags and "@import" not in whole_page
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert {name for name in re.findall(r"url\(#([^)]*)\)", whole_page)} <= set(page.ids)


def test_the_page_follows_the_readers_theme(whole_page: str) -> None:
    assert "prefers-color-scheme: dark" in whole_page and 'name="viewport"' in whole_page
    drawings = "".join(re.findall(r"<svg.*?</svg>", whole_page, re.DOTALL))
    assert "var(--ink)" in drawings
    for colour in (_frame.INK, _frame.SOFT, _frame.LINE, _frame.PAPER):
        assert colour not in drawings


def test_each_picture_holds_its_conditions(whole_page: str) -> None:
    pictures = figures_of(whole_page)
    assert len(pictures) > 5
    for title, words in pictures.items():
        for condition in (
            "AMD EPYC 9R14",
            "2 cores",
            "15 GiB",
            "qwen3moe 30B.A3B Q4_0 (16.04 GiB on disk)",
            "nvme0n1 ext4",
        ):
            assert condition in words, title
        for condition in (
            "GB/s",
            "memory limit: ",
            "limit of the disk: ",
            "context depth",
            "demo corpus",
            "2026-05-04",
            "moestream 0.1.0",
        ):
            assert condition in words, title


def test_a_picture_is_there_if_the_records_have_its_points(whole_page: str, tmp_path: Path) -> None:
    speeds = [title for title in figures_of(whole_page) if title.startswith("Speed")]
    assert speeds == ["Speed by memory limit, tg256", "Speed by context depth, tg256", "Speed by disk, tg256"]
    one = figures_of(reported([record()], tmp_path))
    assert list(one) == [
        "Memory against disk",
        "Time of tokens, tg256, 4 GiB of memory",
        "Time of a token by part, tg256",
    ]
    caches = figures_of(reported(cache_sizes(), tmp_path))
    assert "expert cache (GiB)" in caches["Speed by cache size, tg256"]
    assert "stock-mmap (no cache)" in caches["Speed by cache size, tg256"]
    prompt = record(n_prompt=512, n_gen=0, token_ns=[], **dict.fromkeys(("wait_ms", "peak_rss")))
    assert figures_of(reported([prompt], tmp_path)) == {}


def test_memory_is_never_shown_without_size_on_disk(tmp_path: Path) -> None:
    unknown = figures_of(reported([record(bytes_on_disk=None)], tmp_path))
    assert "Memory against disk" not in unknown
    words = figures_of(reported([record()], tmp_path))["Memory against disk"]
    assert "peak RSS" in words and "on disk" in words and "3.72" in words and "16.04" in words


def test_killed_arms_are_shown_as_such(whole_page: str) -> None:
    pictures = figures_of(whole_page)
    for title in (
        "Speed by memory limit, tg256",
        "Time of tokens, tg256, 4 GiB of memory",
        "Time of a token by part, tg256",
    ):
        assert "killed: out of memory" in pictures[title], title
    assert "killed: out of memory" in pictures["Memory against disk"]


def test_a_killed_arm_is_a_cross_at_nothing_and_breaks_the_line() -> None:
    records = [record("a", memory=g * GIB, speed=g) for g in (2, 4)] + [killed("a", memory=GIB, avg_ts=9.0)]
    (picture,) = _figures.by_memory(records, _figures.Styles(["a"]))
    (axes,) = picture.figure.axes
    crosses = [line for line in axes.lines if line.get_marker() == "x"]
    assert [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in crosses] == [([1], [0])]
    curve = next(line for line in axes.lines if line.get_marker() == "o")
    assert [round(y) if y == y else None for y in curve.get_ydata()] == [None, 2, 4]


def test_an_arm_has_one_colour_and_marker_of_its_own() -> None:
    styles = _figures.Styles(["a:cache=1GiB", "b", "a:cache=2GiB", "a:cache=2GiB:policy=lru"])
    assert styles.of("a:cache=1GiB") == styles.of("a:cache=2GiB")
    looks = [(look["color"], look["marker"]) for look in map(styles.of, ("a:cache=1GiB", "b", "a:policy=lru"))]
    assert len({colour for colour, _ in looks}) == len({marker for _, marker in looks}) == 3
    many = _figures.Styles([f"arm{n}" for n in range(40)])
    assert len({tuple(many.of(f"arm{n}").values()) for n in range(40)}) == 40


def test_pictures_have_their_words_inside() -> None:
    """Nothing is cut off at an edge: titles, legends and conditions, with the longest names."""
    long = "stream-prefetch:cache=3GiB:policy=lrfu:reader=uring"
    records = [
        r
        for g in (2, 4)
        for r in (record(long, memory=g * GIB), record("stock-mmap", memory=g * GIB), killed(memory=g * GIB))
    ]
    styles = _figures.Styles(r["arm"] for r in records)
    for _, drawers in _figures.SECTIONS:
        for picture in (p for draw in drawers for p in draw(records, styles)):
            width, height = picture.figure.get_size_inches()
            drawn = picture.figure.get_tightbbox()
            assert drawn.x0 >= 0 and drawn.y0 >= 0 and drawn.x1 <= width and drawn.y1 <= height, picture.title


def test_the_same_records_give_the_same_picture() -> None:
    styles = _figures.Styles(["stream-prefetch"])
    first, second = (_frame.svg(next(_figures.token_times([record()], styles)), text=False) for _ in range(2))
    assert first == second and "<dc:date>" not in first
    ElementTree.fromstring(first)


def test_names_are_text_wherever_they_stand(tmp_path: Path) -> None:
    nasty = "<script>alert(1)</script>&\"'$x^2$ 模型\x00"
    page = reported(
        [record(nasty, model_type=nasty, warnings=[nasty], workload=nasty, disk={"device": nasty})],
        tmp_path,
        title=nasty,
    )
    assert "script" not in Page(page).tags
    assert "<script" not in page
    assert "$x^2$" in figures_of(page)["Memory against disk"]


def test_warnings_stand_on_top(whole_page: str) -> None:
    top = whole_page[: whole_page.index("<table")]
    assert "other processes used 31% of a core meanwhile" in top
    assert "(stream-prefetch, stream-reactive)" in top


def test_a_record_is_there_whole(tmp_path: Path) -> None:
    page = reported([record(newer_key="new value")], tmp_path)
    for key in (*LLAMA_BENCH_KEYS, *OUR_KEYS, "newer_key"):
        assert key in page
    assert "new value" in page
    assert "17,219,000,000" in page
    assert "versions: {&quot;moestream&quot;: &quot;0.1.0&quot;" in page
    assert re.search(r"Not known: [^<]*energy_j_per_token", page)


def test_a_record_with_little_in_it_makes_a_page_too(tmp_path: Path) -> None:
    little = {
        key: record()[key] for key in ("model_filename", "n_prompt", "n_gen", "n_depth", "avg_ts", "arm", "outcome")
    }
    assert "qwen3-30b-a3b-q4_0.gguf" in reported([little], tmp_path)


def test_a_report_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="absent/report.html: cannot be written: No such file"):
        write_report([record()], tmp_path / "absent" / "report.html")
    with pytest.raises(OptionError, match="a report needs at least one record"):
        write_report([], tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(OptionError, match=r"plots need matplotlib: pip install 'moestream\[plots\]'"):
        write_report([record()], tmp_path / "report.html")


def test_records_are_written_without_matplotlib() -> None:
    code = "import sys; sys.modules['matplotlib'] = None; import moestream.bench.writers, moestream.bench.compare, moestream.bench.report"
    subprocess.run([sys.executable, "-c", code], check=True)


# The pictures of the README

PLOT_RESULTS = Path(__file__).resolve().parent.parent / "tools" / "plot_results"


@pytest.fixture
def plot_results(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs the tool in this process; gives its exit status and what it complained about."""
    loader = importlib.machinery.SourceFileLoader("plot_results", str(PLOT_RESULTS))
    tool = importlib.util.module_from_spec(importlib.util.spec_from_loader("plot_results", loader))  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(tool)

    def run(*options: str | Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["plot_results", *map(str, options)])
        return tool.main(), capsys.readouterr().err

    return run


def test_plot_results_draws_the_story_and_knows_its_own_pictures(
    tmp_path: Path, plot_results: Callable[..., tuple[int, str]]
) -> None:
    results, output = tmp_path / "results", tmp_path / "docs"
    results.mkdir()
    output.mkdir()
    small = record(memory=8 * GIB, model_size=10, model_type="a small one")
    (results / "run.json").write_text(written("json", [*sweep(), small]))
    folders = ("--results", results, "--output", output)

    assert plot_results(*folders) == (0, "")
    assert sorted(p.name for p in output.iterdir()) == [
        "memory-against-disk.svg",
        "speed-by-memory.svg",
        "time-of-a-token.svg",
    ]
    for picture in output.iterdir():
        ElementTree.fromstring(picture.read_text())
    assert plot_results(*folders, "--check") == (0, "")

    (results / "run.json").write_text(written("json", sweep()[:-1] + [record(memory=6 * GIB, speed=20)]))
    status, complaint = plot_results(*folders, "--check")
    assert status == 1
    assert "speed-by-memory.svg is not the picture of the records: run tools/plot_results" in complaint


def test_plot_results_says_what_the_records_lack(tmp_path: Path, plot_results: Callable[..., tuple[int, str]]) -> None:
    folders = ("--results", tmp_path, "--output", tmp_path)
    status, complaint = plot_results(*folders)
    assert status == 1 and "no records of stock-mmap, stock-mmap-tuned, stock-none" in complaint
    (tmp_path / "a.json").write_text(written("json", [record(memory=2 * GIB)]))
    assert "speed by memory limit: the records give 0 pictures instead of one" in plot_results(*folders)[1]
    elsewhere = [
        record(memory=g * GIB, cpu_info=cpu, machine={**MACHINE, "cpu": cpu}) for g in (2, 8) for cpu in ("X", "Y")
    ]
    (tmp_path / "a.json").write_text(written("json", elsewhere))
    assert "the records give 2 pictures instead of one; keep records of one machine" in plot_results(*folders)[1]
    (tmp_path / "a.json").write_text(written("json", [record(memory=g * GIB) for g in (2, 8)]))
    assert "no records with a memory limit of 4 GiB" in plot_results(*folders)[1]
