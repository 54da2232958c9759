"""Files: what is written comes back, and whatever is wrong with one is said in one line."""

import gzip
import json
import lzma
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from harts.data.formats.jsonl import read_jsonl
from harts.data.read import read
from harts.data.trajectory import TrajectoryBatch
from harts.data.write import write
from harts.errors import DataError
from tests.data.comparison import assert_equal_batches
from tests.data.test_trajectory import any_rows, small_row

zstandard = pytest.importorskip("zstandard", reason="needs zstandard, which GPU machines may lack")

JSON_SUFFIXES = [".jsonl", ".json", ".ndjson", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst"]
LINE = b'{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}\n'
COMPRESS = {
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def long_lines(number=2000):
    rng = np.random.default_rng(0)
    rows = [{"input_ids": rng.integers(0, 999, 20).tolist(), "loss_mask": [0] * 20}] * number
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.mark.parametrize("suffix", [*JSON_SUFFIXES, ".parquet"])
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=any_rows())
def test_what_is_written_is_read_back_exactly(tmp_path, suffix, rows):
    batch = TrajectoryBatch.from_rows(rows)
    path = tmp_path / f"batch{suffix}"
    write(batch, path)
    assert_equal_batches(read(path), batch, same_dtypes=suffix == ".parquet")
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_parquet_keeps_what_json_widens(tmp_path):
    batch = TrajectoryBatch.from_rows(
        [
            small_row(v=np.float32([0.1, 0.2, 0.3]), score=np.float32(0.1)),
            small_row(v=1, score=None),
        ]
    )
    write(batch, tmp_path / "a.parquet")
    write(batch, tmp_path / "a.jsonl")
    assert_equal_batches(read(tmp_path / "a.parquet"), batch)
    widened = read(tmp_path / "a.jsonl")
    assert widened.position_fields["v"].dtype == np.float64
    assert widened.position_fields["v"].tolist() == batch.position_fields["v"].tolist()


def test_the_same_batch_gives_the_same_bytes(tmp_path):
    batch = TrajectoryBatch.from_rows([small_row(reward=0.5)])
    for suffix in (".jsonl.gz", ".jsonl.xz", ".jsonl.zst", ".parquet"):
        write(batch, tmp_path / f"a{suffix}")
        write(batch, tmp_path / f"b{suffix}")
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


@pytest.mark.parametrize(
    "value", [(1, 2), b"x", {1: "a"}, {"a": (1,)}, {"a": "\ud800"}, 1j, {1}], ids=str
)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_objects_that_json_would_change_are_refused_and_nothing_is_left(tmp_path, value, suffix):
    fields = {"meta": np.empty(1, object)}
    fields["meta"][0] = value
    batch = TrajectoryBatch(
        tokens=np.array([1], np.int32),
        offsets=np.array([0, 1]),
        loss_mask=np.array([False]),
        trajectory_fields=fields,
    )
    with pytest.raises(DataError, match=r"trajectory 0: meta is .*JSON cannot hold exactly; use"):
        write(batch, tmp_path / f"a{suffix}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a", "a.txt", "a.parquet.gz", "a.gz", "no/a.jsonl", "dir.jsonl"])
def test_a_place_that_cannot_be_written_is_refused(tmp_path, name):
    (tmp_path / "dir.jsonl").mkdir()
    with pytest.raises(DataError, match=r"; (name it|check)"):
        write(TrajectoryBatch.from_rows([small_row()]), tmp_path / name)
    assert [file.name for file in tmp_path.iterdir()] == ["dir.jsonl"]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    write(TrajectoryBatch.from_rows([small_row()]), path)
    before = path.read_bytes()

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("harts.data.write.json.dumps", stop)
    with pytest.raises(KeyboardInterrupt):
        write(TrajectoryBatch.from_rows([small_row(), small_row()]), path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl"]


def test_lines_are_counted_from_1_with_blank_ones(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf\n" + LINE + b"  \r\n" + LINE.strip())
    batch = read(path)
    assert batch.sources == ("a.jsonl:2", "a.jsonl:4")
    assert batch.tokens.tolist() == [1, 2, 3, 1, 2, 3]


def test_the_format_is_known_by_content_without_a_suffix(tmp_path):
    batch = TrajectoryBatch.from_rows([small_row()])
    for suffix in (".jsonl", ".parquet"):
        write(batch, tmp_path / f"a{suffix}")
        path = (tmp_path / f"a{suffix}").rename(tmp_path / f"a-{suffix[1:]}")
        assert_equal_batches(read(path), batch)
        assert_equal_batches(read(str(path), format=suffix[1:]), batch)
    (tmp_path / "rows.gz").write_bytes(gzip.compress(LINE))
    assert len(read(tmp_path / "rows.gz")) == 1


def test_several_frames_or_members_are_one_file(tmp_path):
    for suffix, compress in COMPRESS.items():
        path = tmp_path / f"a.jsonl{suffix}"
        path.write_bytes(compress(LINE) + compress(long_lines(50)))
        assert len(read(path)) == 51


def test_a_line_of_columns_is_one_row_an_entry(tmp_path):
    line = {
        "prompt_token_ids": [[1, 2], [3]],
        "response_ids": [[4], [5, 6]],
        "loss_masks": [[1], [0, 1]],
        "rewards": [0.5, 1.0],
        "rollout_logprobs": [[-0.5], [-0.25, -0.125]],
        "trajectory_ids": [{"instance_id": "a"}, {"instance_id": "b"}],
        "stop_reasons": None,
    }
    (tmp_path / "a.jsonl").write_text(json.dumps(line))
    batch = read(tmp_path / "a.jsonl")
    assert batch.tokens.tolist() == [1, 2, 4, 3, 5, 6]
    assert batch.loss_mask.tolist() == [False, False, True, False, False, True]
    assert batch.position_fields["rollout_logprobs"].tolist() == [0, 0, -0.5, 0, -0.25, -0.125]
    assert batch.trajectory_fields["rewards"].tolist() == [0.5, 1.0]
    assert batch.name_of(1) == "trajectory 1 (a.jsonl:1[1])"
    line["rewards"] = [1.0]
    (tmp_path / "a.jsonl").write_text(json.dumps(line))
    with pytest.raises(
        DataError, match=r"a.jsonl:1: rewards has 1 entries, prompt_token_ids 2; give"
    ):
        read(tmp_path / "a.jsonl")


BIG = b'{"input_ids": [1], "loss_mask": [0], "meta": {"n": 123456789012345678901}, "x": 1e300}\n'


@pytest.mark.parametrize(
    "content", [LINE, BIG, LINE.replace(b"3", b"3.0")], ids=["plain", "big", "float"]
)
def test_both_json_parsers_give_the_same_rows(tmp_path, content):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    assert repr(list(read_jsonl(path, parser="json"))) == repr(
        list(read_jsonl(path, parser="orjson"))
    )


PARQUET = b"PAR1" + b"\x00" * 40 + b"PAR1"

# name, content, pieces of the message in their order
BAD_FILES = {
    "empty": ("a.jsonl", b"", ["a.jsonl", "empty", "; write"]),
    "blank": ("a.jsonl", b"\n \n", ["a.jsonl", "no rows", "; write"]),
    "empty archive": ("a.jsonl.gz", b"", ["a.jsonl.gz", "empty", "; write"]),
    "empty zst": ("a.jsonl.zst", b"", ["a.jsonl.zst", "empty", "; write"]),
    "empty parquet": ("a.parquet", b"", ["a.parquet", "empty", "; write"]),
    "cut line": ("a.jsonl", LINE + LINE[:20], ["a.jsonl:2", "broken JSON", "column", "; write"]),
    "no JSON": (
        "a.jsonl",
        LINE + b"\nhello\n",
        ["a.jsonl:3", "broken JSON at column 1", "; write"],
    ),
    "array": ("a.jsonl", b"[1, 2]\n", ["a.jsonl:1", "an array, not an object", "; write one"]),
    "array over lines": (
        "a.json",
        b"\n[\n  " + LINE.strip() + b",\n  " + LINE.strip() + b"\n]\n",
        ["a.json: the file is a JSON array, not JSON lines; write one object a line (jq -c '.[]'"],
    ),
    "array from the first line": (
        "a.json",
        b"[" + LINE.strip() + b",\n" + LINE.strip() + b"]",
        ["a.json: the file is a JSON array", "; write one object a line"],
    ),
    "arrays a line": ("a.jsonl", b"[1]\n[2]\n", ["a.jsonl:1", "an array, not an object", "; "]),
    "cut array": ("a.json", b"[\n" + LINE.strip() + b",\n", ["a.json:1", "broken JSON", "; "]),
    "number": ("a.jsonl", LINE + b"7\n", ["a.jsonl:2", "not an object", "; write one"]),
    "null": ("a.jsonl", LINE + b"null", ["a.jsonl:2", "null, not an object", "; write one"]),
    "string": ("a.jsonl", LINE + b'"x"', ["a.jsonl:2", "a string, not an object", "; write one"]),
    "pretty": ("a.json", b'{\n"input_ids": [1]}', ["a.json:1", "broken JSON", "; write one JSON"]),
    "two on a line": (
        "a.jsonl",
        LINE.strip() * 2,
        ["a.jsonl:1", "broken JSON at column", "; write"],
    ),
    "NaN": ("a.jsonl", LINE[:-2] + b', "r": NaN}', ["a.jsonl:1", "holds NaN", "; use finite"]),
    "infinity": ("a.jsonl", LINE[:-2] + b', "r": -Infinity}', ["a.jsonl:1", "Infinity", "; use"]),
    "overflow": ("a.jsonl", LINE[:-2] + b', "r": 1e999}', ["a.jsonl:1", "; "]),
    "UTF-8": (
        "a.jsonl",
        LINE + b'{"a": "\xff"}\n',
        ["a.jsonl:2", "byte 8", "not UTF-8", "; write"],
    ),
    "UTF-16": ("a.jsonl", LINE.decode().encode("utf-16"), ["a.jsonl:1", "not UTF-8", "; write"]),
    "deep": ("a.jsonl", b"[" * 100_000, ["a.jsonl:1", "broken JSON", "; write"]),
    "not gz": ("a.jsonl.gz", LINE, ["a.jsonl.gz", "not a whole .gz", "; copy"]),
    "not xz": ("a.jsonl.xz", LINE, ["a.jsonl.xz", "not a whole .xz", "; copy"]),
    "not zst": ("a.jsonl.zst", LINE, ["a.jsonl.zst", "not a whole .zst", "; copy"]),
    "gz and junk": ("a.jsonl.gz", gzip.compress(LINE) + b"junk", ["not a whole .gz", "; copy"]),
    "not parquet": ("a.parquet", LINE, ["a.parquet", "not a whole Parquet", "; copy"]),
    "broken parquet": ("a.parquet", PARQUET, ["a.parquet", "not a whole Parquet", "; copy"]),
    "parquet as jsonl": ("a.jsonl", PARQUET, ["a.jsonl", "the content is Parquet", "; rename"]),
    "parquet.gz": ("a.parquet.gz", gzip.compress(PARQUET), ["Parquet inside", "; decompress"]),
    "unknown": ("a.txt", b"hello", ["a.txt", "format is not known", "; use one of jsonl"]),
    "bad row": (
        "a.jsonl",
        LINE + b"{}\n",
        ["trajectory 1 (a.jsonl:2): ", "no input_ids", "; give"],
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_refused_in_one_line(tmp_path, case):
    name, content, pieces = BAD_FILES[case]
    (tmp_path / name).write_bytes(content)
    message = refused(tmp_path / name)
    position = 0
    for piece in pieces:
        assert piece in message[position:], message
        position = message.index(piece, position)


@pytest.mark.parametrize("case", ["NaN", "infinity", "overflow", "cut line", "deep"])
def test_the_standard_parser_refuses_what_orjson_refuses(tmp_path, case):
    name, content, _ = BAD_FILES[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=r"a.jsonl:\d.*; "):
        TrajectoryBatch.from_named_rows(read_jsonl(tmp_path / name, parser="json"))


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("kept", [0.5, 0.999])
def test_an_archive_that_is_cut_short_is_refused(tmp_path, suffix, kept):
    content = COMPRESS[suffix](long_lines())
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(content[: int(len(content) * kept)])
    assert "the archive is cut short; copy or write it again" in refused(path)


def test_parquet_that_is_cut_short_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    write(TrajectoryBatch.from_rows([small_row()] * 100), path)
    path.write_bytes(path.read_bytes()[:-20])
    assert "not a whole Parquet file" in refused(path)


def test_missing_files_folders_and_formats_are_refused(tmp_path):
    assert "no.jsonl: no such file; check the path" in refused(tmp_path / "no.jsonl")
    assert "no.parquet: no such file; check the path" in refused(tmp_path / "no.parquet")
    assert "is a directory; give one file" in refused(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(LINE)
    with pytest.raises(DataError, match="format is 'csv'; use one of jsonl, parquet"):
        read(tmp_path / "a.jsonl", format="csv")


def test_optional_packages_are_named_where_they_are_missing(tmp_path, monkeypatch):
    batch = TrajectoryBatch.from_rows([small_row()])
    (tmp_path / "a.jsonl").write_bytes(LINE)
    for module, name in (("pyarrow", "a.parquet"), ("zstandard", "a.jsonl.zst")):
        write(batch, tmp_path / name)
        monkeypatch.setitem(sys.modules, module, None)
        expected = f"needs the package {module}; pip install 'harts[data]'"
        assert expected in refused(tmp_path / name)
        with pytest.raises(DataError, match="pip install"):
            write(batch, tmp_path / name)
    monkeypatch.setitem(sys.modules, "orjson", None)
    assert len(read(tmp_path / "a.jsonl")) == 1


def test_parquet_columns_of_every_kind_are_read(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "input_ids": pa.array([[1, 2], [3]], pa.list_(pa.uint16())),
        "loss_mask": pa.array([[0, 1], [0]], pa.large_list(pa.int8())),
        "half": pa.array([0.5, None], pa.float16()),
        "name": pa.array(["a", None]).dictionary_encode(),
        "meta": pa.array([{"a": 1}, {"a": 2}]),
        "flag": pa.array([True, False]),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    batch = read(tmp_path / "a.parquet")
    assert batch.tokens.tolist() == [1, 2, 3]
    assert batch.trajectory_fields["half"].dtype == np.float16
    assert batch.trajectory_fields["name"].tolist() == ["a", None]
    assert batch.trajectory_fields["meta"].tolist() == [{"a": 1}, {"a": 2}]
    assert batch.trajectory_fields["flag"].dtype == np.bool_
    assert batch.name_of(1) == "trajectory 1 (a.parquet:row 2)"
    columns["input_ids"] = pa.array([[1, None], [3]])
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert "trajectory 0 (a.parquet:row 1): input_ids[1] is null" in refused(tmp_path / "a.parquet")
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    pq.write_table(table, tmp_path / "a.parquet")
    assert "two columns are named a; rename" in refused(tmp_path / "a.parquet")


def test_parquet_with_many_row_groups_keeps_its_order(tmp_path):
    rows = [{"input_ids": [i, i + 1], "loss_mask": [0, 1], "n": i} for i in range(1000)]
    batch = TrajectoryBatch.from_rows(rows)
    write(batch, tmp_path / "a.parquet")
    assert_equal_batches(read(tmp_path / "a.parquet"), batch)


def test_reading_imports_neither_torch_nor_transformers():
    code = (
        "import sys, harts.data.read, harts.data.write, harts.data.synthetic; print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "pyarrow", "zstandard"} & set(done.stdout.split())


def refused(path: Path) -> str:
    """The message of reading `path`, which is one line."""
    with pytest.raises(DataError) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)
