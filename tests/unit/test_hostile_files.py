"""Every command that reads a file a user names: it gives output, or one line that says what is
wrong with the file. No traceback, no wait without end, nothing that a terminal would act on."""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hostile import (
    CONTENTS,
    ESCAPE,
    assert_clear,
    assert_refused,
    slipstream,
    special_files,
    write,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.apps.bench.reading import read_bytes
from slipstream.apps.bench.workloads import workload
from slipstream.errors import ConfigError, SecretError
from slipstream.input_files import read_limited
from slipstream.planning.overlays import read_topology
from slipstream.printable import shown
from slipstream.runtime.process.environment import read_secret


def brief(value: object) -> str:
    return shown(value)[:30]


# By command: the name its file has, and how it is called with it.
READERS: dict[str, tuple[str, Callable[[Path], tuple[object, ...]]]] = {
    "plan-backups": ("run.jsonl", lambda file: ("plan-backups", file)),
    "plan-tree": ("net.toml", lambda file: ("plan-tree", "--topology", file)),
    "plan, json": ("net.json", lambda file: ("plan", file)),
    "plan, csv": ("net.csv", lambda file: ("plan", file)),
    "plan, tree": (
        "net.toml",
        lambda file: ("plan", "alexnet", f"--strategy=parameter_flow(tree={str(file)!r})"),
    ),
    "bench, json": ("net.json", lambda file: ("bench", "fc", f"--device-ms={file}")),
    "bench, csv": ("net.csv", lambda file: ("bench", "fc", f"--device-ms={file}")),
    "run": ("secret", lambda file: ("run", f"--secret-file={file}", __file__)),
    "probe": ("secret", lambda file: ("probe", f"--secret-file={file}", "no-such-host.invalid")),
}
NOT_SECRET = [name for name in READERS if name not in ("run", "probe")]


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("reader", NOT_SECRET)
def test_what_is_no_such_file(reader: str, content: str, tmp_path: Path) -> None:
    name, call = READERS[reader]
    file = write(tmp_path / name, CONTENTS[content])
    said = assert_refused(slipstream(*call(file)))
    assert str(file) in said


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_that_can_be_held(reader: str, tmp_path: Path) -> None:
    name, call = READERS[reader]
    for kind, file in special_files(tmp_path, Path(name).suffix).items():
        said = assert_refused(slipstream(*call(file)))
        if kind == "a vast file":
            assert "has more than" in said
            assert "the limit" in said
        if kind == "a device":
            assert "it is a device, not a file" in said


def test_pipes_that_are_filled_are_read(tmp_path: Path) -> None:
    """As ``<(…)`` of a shell makes them."""
    reader, writer = os.pipe()
    os.write(writer, b"x" * 1000)
    os.close(writer)
    assert read_limited(Path(f"/dev/fd/{reader}"), 1000) == b"x" * 1000
    os.close(reader)
    endless = tmp_path / "pipe"
    os.mkfifo(endless)

    def fill() -> None:
        with suppress(BrokenPipeError), endless.open("wb", buffering=0) as pipe:
            opened.set()
            while True:
                pipe.write(bytes(4096))

    opened = threading.Event()
    holder = os.open(endless, os.O_RDONLY | os.O_NONBLOCK)  # so that the writer can begin
    thread = threading.Thread(target=fill)
    thread.start()
    opened.wait()
    try:
        with pytest.raises(OSError, match="has more than"):
            read_limited(endless, 10_000)
    finally:
        os.close(holder)
        thread.join()


def test_a_secret_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(SecretError, match=r"has more than 64\.0 KiB"):
        read_secret({"SLIPSTREAM_SECRET_FILE": str(write(tmp_path / "s", b"x" * 100_000))})


# ---- run logs

STEADY = [0.1] * 8


def log_of(durations: Any) -> bytes:
    return json.dumps({"event": "rounds", "durations_s": durations}).encode() + b"\n"


@pytest.mark.parametrize(
    ("durations", "says"),
    [
        ({"0": STEADY, "1": [1e308] * 8}, "worker 1, step 0: a duration of 1e+308 s cannot be"),
        ({"0": STEADY, "1": [5e-324] * 8}, "worker 1, step 0: a duration of 5e-324 s cannot be"),
        ({"0": STEADY, "1": [float("nan")] * 8}, "a duration of nan s cannot be"),
        ({"0": STEADY, "1": [float("inf")] * 8}, "a duration of inf s cannot be"),
        ({"0": STEADY, "1": [10**400] * 8}, "cannot be read"),
        ({"0": STEADY, f"1{ESCAPE}": STEADY}, r"\x1b[2J"),
        ({"0": STEADY, "9" * 5000: STEADY}, "cannot be read"),
        ({str(w): STEADY for w in range(3000)}, "of 3000 workers: splits of 1024 at most"),
        (list(range(10)), "cannot be read"),
        ({"0": STEADY, "1": {"a": 1}}, "cannot be read"),
    ],
    ids=brief,
)
def test_durations_that_cannot_be(durations: Any, says: str, tmp_path: Path) -> None:
    file = write(tmp_path / "run.jsonl", log_of(durations))
    said = assert_refused(slipstream("plan-backups", file))
    assert says in said
    assert str(file) in said


def test_as_many_workers_as_are_allowed(tmp_path: Path) -> None:
    file = write(tmp_path / "run.jsonl", log_of({str(w): STEADY for w in range(300)}))
    assert "best: first=300" in assert_clear(slipstream("plan-backups", file, "--rounds=3"))


@pytest.mark.parametrize(
    "options",
    [
        ["--rounds=1000000000000"],
        ["--iterations=1:1e308,2:1e308"],
        ["--iterations=1:1e-320,2:1e-320"],
        [f"--iterations={'9' * 5000}:1,2:{'9' * 5000}"],
        [f"--iterations={ESCAPE}"],
    ],
)
def test_options_that_cannot_be(options: list[str], tmp_path: Path) -> None:
    file = write(tmp_path / "run.jsonl", log_of({"0": STEADY, "1": STEADY}))
    assert_refused(slipstream("plan-backups", file, *options))


def test_a_line_of_a_log_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.apps.cli.plan_backups.MOST_LINE_BYTES", 1000)
    file = write(tmp_path / "run.jsonl", log_of({"0": STEADY, "1": [0.1] * 500}))
    assert "one of its lines has more than 1000 B" in assert_refused(
        slipstream("plan-backups", file)
    )


numbers = st.one_of(
    st.floats(), st.integers(), st.just(10**400), st.sampled_from([1e308, 5e-324, 1e-300])
)
scalars = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=5))
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)
steps = st.lists(st.floats(1e-9, 1e9), min_size=8, max_size=9) | st.lists(numbers, min_size=8)
durations = st.dictionaries(st.integers(0, 99).map(str), steps | values, min_size=2, max_size=5)
events = st.fixed_dictionaries({"event": st.just("rounds"), "durations_s": durations | values})


@given(st.lists(events | values, max_size=3))
def test_any_json_as_a_run_log(tmp_path_factory: pytest.TempPathFactory, lines: list[Any]) -> None:
    text = "\n".join(json.dumps(line) for line in lines)
    file = write(tmp_path_factory.getbasetemp() / "any.jsonl", text.encode())
    assert_clear(slipstream("plan-backups", file, "--rounds=20"))


@settings(max_examples=20)
@given(st.binary(max_size=60))
def test_any_bytes_as_any_file(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    for reader in ("plan-backups", "plan-tree", "plan, json", "plan, csv"):
        name, call = READERS[reader]
        assert_clear(slipstream(*call(write(tmp_path_factory.getbasetemp() / name, content))))


# ---- topologies

HOST = "[[hosts]]\nname = {}\nrate = {}\nworkers = [{}]\n"


def hosts(count: int) -> str:
    return "".join(HOST.format(f'"n{i}"', '"1gbit"', i) for i in range(count))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (hosts(3000), "a network of 3000 hosts: trees are worked out for 256 at most"),
        (hosts(2) + "[costs]\notherwise = 1e308\n", "is no number of 0 or more, up to 1e+06"),
        (hosts(2) + "[costs]\notherwise = nan\n", "costs.otherwise: nan is no number"),
        (HOST.format('"a"', "1e308", 0), "a rate of 1e+308 bit/s is no link's"),
        (HOST.format('"a"', "1e-308", 0), "a rate of 1e-308 bit/s is no link's"),
        (HOST.format('"a"', '"' + "9" * 400 + 'gbit"', 0), "rate: a rate of inf bit/s is no"),
        (HOST.format('"a"', "0x" + "f" * 5000, 0), "a rate of <int> bit/s is no link's"),
        (HOST.format('"a"', "1", "0x" + "f" * 5000), "hosts: workers: 0 is on none"),
        (HOST.format('"a"', "1", "-" + "9" * 4000), "is no number of one"),
        (HOST.format('"\\u001b[2J"', '"1gbit"', 0), r"hosts[0].name: '\x1b[2J' is no name"),
        (HOST.format('"\\u202ekcar"', '"1gbit"', 0), r"'\u202ekcar' is no name"),
        (HOST.format('"' + "a" * 101 + '"', '"1gbit"', 0), "at most 100 printable letters"),
        (hosts(1) + '["\\u001b[2J"]\nx = 1\n', r"\x1b[2J: unknown key"),
        (hosts(1) + f'["{"k" * 5000}"]\nx = 1\n', "unknown key"),
        (HOST.format('"a"', "[[[[[[1]]]]]]", 0), "is no rate"),
        (f"workers = [{'0, ' * 100000}]\n" + hosts(1), "workers: unknown key"),
    ],
    ids=brief,
)
def test_networks_that_cannot_be(text: str, says: str, tmp_path: Path) -> None:
    file = write(tmp_path / "net.toml", text.encode())
    said = assert_refused(slipstream("plan-tree", "--topology", file))
    assert says in said
    assert str(file) in said


def test_racks_that_all_differ_are_refused_before_it_takes_hours(tmp_path: Path) -> None:
    each = "".join(
        f'[[hosts]]\nrack = "r{i % 16}"\nrate = "1gbit"\nworkers = [{i}]\n' for i in range(24)
    )
    measured = [[1e6 + 997 * i + 31 * j for j in range(24)] for i in range(24)]
    rows = ",\n".join(json.dumps(row) for row in measured)
    file = write(tmp_path / "net.toml", f"bandwidths = [{rows}]\n{each}".encode())
    said = assert_refused(slipstream("plan-tree", "--topology", file))
    assert "24 servers see the 16 racks differently" in said


@pytest.mark.parametrize(
    "options",
    [
        ["--hosts=3000"],
        ["--hosts=1000000000000"],
        ["--hosts=4", "--servers=1000000000"],
        ["--hosts=4", "--model-mib=1e302"],
        ["--hosts=4", "--block-mib=1e302"],
        ["--hosts=4", "--alpha=1e308"],
        ["--hosts=4", "--rate=" + "9" * 400 + "gbit"],
        ["--hosts=4", "--core-rate=0." + "0" * 400 + "1bit"],
    ],
)
def test_network_options_that_cannot_be(options: list[str]) -> None:
    assert_refused(slipstream("plan-tree", *options))


def test_a_tree_is_no_deeper_than_it_has_hosts() -> None:
    said = assert_clear(slipstream("plan-tree", "--hosts=4", "--depth=1000000000"))
    assert "depth 3" in said


NAMES = ["[red]n0[/red]", "[/]", "[bold", ":skull:", "a\\", "[link=file:///etc/passwd]x"]


def test_names_are_shown_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = "".join(HOST.format(json.dumps(name), '"1gbit"', i) for i, name in enumerate(NAMES))
    out = assert_clear(
        slipstream("plan-tree", "--topology", write(tmp_path / "net.toml", text.encode()))
    )
    for name in NAMES:
        assert f"on {name}, rack r0" in out


def test_formulas_in_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    text = "".join(HOST.format(f"'$\\frac{{$ {i}'", '"1gbit"', i) for i in range(3))
    file, plot = write(tmp_path / "net.toml", text.encode()), tmp_path / "tree.svg"
    assert_clear(slipstream("plan-tree", "--topology", file, "--plot", plot))
    assert plot.stat().st_size


def toml(value: Any) -> str:
    """JSON's texts, numbers and lists are TOML's too, but for these."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return '""' if value is None else json.dumps(value)


rates = st.sampled_from(["1gbit", "none", 1e9, "9kbit"]) | scalars
host_tables = st.fixed_dictionaries(
    {"rate": rates},
    optional={
        "name": st.text(max_size=4) | scalars,
        "rack": st.sampled_from(["a", "b", "[red]", "\x1b"]) | scalars,
        "workers": st.lists(st.integers(-1, 3), max_size=3) | values,
        "servers": st.lists(st.integers(0, 1), max_size=2),
        "else": values,
    },
)


@st.composite
def topologies(draw: st.DrawFn) -> str:
    """Near enough to a topology that many are one."""
    tables = draw(st.lists(host_tables, min_size=1, max_size=4))
    if draw(st.booleans()):
        for index, table in enumerate(tables):
            table |= {"workers": [index], "rate": draw(st.sampled_from(["1gbit", 1e15, 1e-3]))}
    top = draw(st.dictionaries(st.sampled_from(["rate", "core_rate", "x"]), rates, max_size=1))
    if draw(st.booleans()):
        size = len(tables)
        top["bandwidths"] = draw(
            st.lists(st.lists(rates, min_size=size, max_size=size), min_size=size, max_size=size)
        )
    lines = [f"{key} = {toml(value)}" for key, value in {**top, "hosts": tables}.items()]
    return "\n".join(lines)


@given(topologies())
def test_any_topology(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    content = text.encode(errors="surrogatepass")
    file = write(tmp_path_factory.getbasetemp() / "any.toml", content)
    assert_clear(slipstream("plan-tree", "--topology", file, "--degree=2"))


@given(st.text(max_size=40))
def test_any_text_as_a_topology(text: str) -> None:
    with pytest.raises(ConfigError):
        read_topology(text, "net.toml")


# ---- layer tables

ROW = {"layer": "fc", "shape": [[10, 10], [10]], "forward_ms": 1.0, "backward_ms": 2.0}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layer": f"a{ESCAPE}"}, r"the layer is called 'a\x1b[2J"),
        ({"layer": "a" * 300}, "200 printable letters"),
        ({"layer": [["a"]]}, "the layer has no name"),
        ({"shape": [[10**18, 10**18]]}, "has more than 1e+11 parameters"),
        ({"shape": [[10**6, 10**6]]}, "more than 1e+11 parameters"),
        ({"shape": [[10**400, 1]]}, "has more than 1e+11 parameters"),
        ({"shape": [[float("inf")]]}, "is not understood"),
        ({"shape": "1x" * 5000 + "1"}, "has more than 8 dimensions"),
        ({"forward_ms": 1e308}, "not a number of milliseconds from 0 to 1e+09"),
        ({"forward_ms": 10**400}, "not a number of milliseconds"),
        ({"backward_ms": float("nan")}, "not a number of milliseconds"),
        ({"kind": [["fc"]]}, "kind [['fc']] is not one of"),
    ],
    ids=brief,
)
@pytest.mark.parametrize("command", [("plan",), ("bench", "fc", "--device-ms")])
def test_layers_that_cannot_be(
    command: tuple[str, ...], change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    table = {"batch": 32, "layers": [ROW | change]}
    file = write(tmp_path / "net.json", json.dumps(table).encode())
    said = assert_refused(slipstream(*command, file))
    assert says in said
    assert str(file) in said


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"layers": [ROW | {"layer": str(i)} for i in range(5000)]}, "more than 4096 layers"),
        ({"batch": 10**400, "layers": [ROW]}, "batch "),
        ({"name": f"a{ESCAPE}", "layers": [ROW]}, r"the table is called 'a\x1b[2J"),
        ({"name": {}, "layers": [ROW]}, "the table has no name"),
        ({"layers": [ROW, ROW]}, "layer 'fc' appears twice"),
    ],
    ids=brief,
)
def test_tables_that_cannot_be(table: dict[str, Any], says: str, tmp_path: Path) -> None:
    file = write(tmp_path / "net.json", json.dumps(table).encode())
    assert says in assert_refused(slipstream("plan", file))


def test_as_many_layers_as_are_allowed(tmp_path: Path) -> None:
    table = {"layers": [ROW | {"layer": str(i)} for i in range(4096)]}
    file = write(tmp_path / "net.json", json.dumps(table).encode())
    assert "4095" in assert_clear(slipstream("plan", file))


layers = st.fixed_dictionaries(
    {},
    optional={
        "layer": st.text(max_size=3) | values,
        "shape": st.lists(st.integers(-1, 2**40), max_size=4) | values,
        "forward_ms": numbers | values,
        "backward_ms": numbers | values,
        "kind": st.sampled_from(["fc", "conv", "embedding", "other"]) | values,
    },
).map(lambda drawn: ROW | drawn)
tables = st.fixed_dictionaries(
    {"layers": st.lists(layers | values, max_size=3) | values},
    optional={"batch": st.integers() | values, "name": st.text(max_size=3) | values},
)


@given(tables | values)
def test_any_json_as_a_layer_table(
    tmp_path_factory: pytest.TempPathFactory, table: dict[str, Any]
) -> None:
    file = write(tmp_path_factory.getbasetemp() / "any.json", json.dumps(table).encode())
    assert_clear(slipstream("plan", file, "--workers=2"))


@pytest.mark.parametrize(
    "model", ["json:nothing", "json:__name__", "no_such:x", ":x", ".a:b", "builtins:dict"]
)
def test_a_factory_that_makes_no_model(model: str) -> None:
    assert_refused(slipstream("plan", model))


# ---- data sets


def load(name: str, folder: Path) -> None:
    """The data, or an error that can be shown."""
    refused = ""
    try:
        workload(name, data=folder)
    except ConfigError as error:
        refused = str(error)
    assert refused.isprintable()
    assert len(refused) < 1500


DATA = {
    "lr": "rows.svm",
    "mf": "ratings.csv",
    "text": "data.json",
    "mnist": "train-images-idx3-ubyte",
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", DATA)
def test_what_is_no_data(name: str, content: str, tmp_path: Path) -> None:
    write(tmp_path / DATA[name], CONTENTS[content])
    load(name, tmp_path)
    write(tmp_path / f"{DATA[name]}.gz", gzip.compress(CONTENTS[content]))
    load(name, tmp_path)


@pytest.mark.parametrize("name", DATA)
def test_data_that_cannot_be_held(name: str, tmp_path: Path) -> None:
    for index, kind in enumerate(special_files(tmp_path).values()):
        folder = tmp_path / f"set{index}"
        folder.mkdir()
        (folder / DATA[name]).symlink_to(kind)
        load(name, folder)


def test_a_small_packed_file_may_be_a_vast_one(tmp_path: Path) -> None:
    packed = write(tmp_path / "train.gz", gzip.compress(bytes(10_000_000)))
    assert packed.stat().st_size < 20_000
    with pytest.raises(ConfigError, match="it has more than 976"):
        read_bytes(packed, "give another", 1_000_000)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("1 99999999999999999999:1", "indices up to"),
        ("1 100000000:1", "indices up to"),
        ("1 1:1e39", "with a value up to"),
        ("1 1:nan", "with a value up to"),
        (f"{ESCAPE} 1:1", r"label '\\x1b"),
    ],
)
def test_rows_that_cannot_be(row: str, says: str, tmp_path: Path) -> None:
    write(tmp_path / "rows.svm", f"1 1:1\n{row}\n".encode())
    with pytest.raises(ConfigError, match=says):
        workload("lr", data=tmp_path)


@given(st.lists(st.lists(st.text(max_size=4) | st.floats().map(str), max_size=4), max_size=4))
def test_any_rows(tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]]) -> None:
    folder = tmp_path_factory.getbasetemp() / "any data"
    folder.mkdir(exist_ok=True)
    text = "\n".join(" ".join(row) for row in rows).encode(errors="surrogatepass")
    write(folder / "rows.svm", b"1 1:1\n" + text)
    load("lr", folder)
    text = "\n".join(",".join(row) for row in rows).encode(errors="surrogatepass")
    write(folder / "ratings.csv", b"userId,movieId,rating\n1,1,1\n2,2,2\n" + text)
    load("mf", folder)


# ---- probes


@pytest.mark.parametrize(
    "arguments",
    [
        [f"h{ESCAPE}:1:2]"],
        ["127.0.0.1:99999"],
        ["127.0.0.1:" + "9" * 5000],
        ["127.0.0.1", f"--at-most={'9' * 400}gb"],
        ["127.0.0.1", f"--fastest={'9' * 400}gbit"],
    ],
    ids=brief,
)
def test_places_and_amounts_that_cannot_be(arguments: list[str]) -> None:
    assert_refused(slipstream("probe", *arguments))


# ---- what cannot be written


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full as Linux has it")
def test_a_report_that_cannot_be_written_is_printed(tmp_path: Path) -> None:
    code, _, err = slipstream("plan", "alexnet", "--json=/dev/full")
    assert code == 1
    first, report = err.splitlines()
    assert first == (
        "slipstream: --json /dev/full cannot be written (No space left on device); here it is:"
    )
    assert json.loads(report)["model"] == "alexnet"
    code, _, err = slipstream("plan-tree", "--hosts=3", "--json=/dev/full")
    assert (code, len(err.splitlines())) == (1, 2)
