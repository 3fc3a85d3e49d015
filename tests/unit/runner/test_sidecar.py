"""The output folder, names that never collide, json that is whole or absent."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runner.errors import UsageError
from runner.sidecar import check_output_directory, output_path, partial_path, write_json


def test_output_directory_is_created(tmp_path: Path) -> None:
    directory = check_output_directory(tmp_path / "a" / "b", needed_bytes=1)
    assert directory == tmp_path / "a" / "b"
    assert list(directory.iterdir()) == [], "the probe was left behind"
    assert check_output_directory(str(directory), needed_bytes=0) == directory


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check_output_directory("~/out", needed_bytes=1) == tmp_path / "out"


def test_output_directory_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--output_directory \S+/file cannot be written \(it is a file\)"):
        check_output_directory(tmp_path / "file", needed_bytes=1)
    with pytest.raises(UsageError, match=r"/file/below cannot be written \(Not a directory\); give a folder"):
        check_output_directory(tmp_path / "file" / "below", needed_bytes=1)
    with pytest.raises(UsageError, match=r"has [\d.,]+ [GM]iB free and the results need 1,073,741,824\.0 GiB"):
        check_output_directory(tmp_path, needed_bytes=2**60)


def test_unwritable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a failing write and not by chmod, which does not stop root."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
    with pytest.raises(UsageError, match=r"cannot be written \(Permission denied\)"):
        check_output_directory(tmp_path, needed_bytes=1)


def test_names_never_collide(tmp_path: Path) -> None:
    first = output_path(tmp_path, "v")
    assert first == tmp_path / "v.mp4"
    assert partial_path(first).exists()
    assert output_path(tmp_path, "v") == tmp_path / "v_1.mp4", "reserved, though no v.mp4 is there yet"
    partial_path(first).rename(first)
    (tmp_path / "v_2.json").touch()
    assert output_path(tmp_path, "v") == tmp_path / "v_3.mp4"
    assert not partial_path(tmp_path / "v_2.mp4").exists(), "a refused name stayed reserved"


def test_names_are_race_free(tmp_path: Path) -> None:
    def take(_: int) -> Path:
        path = output_path(tmp_path, "v")
        partial_path(path).rename(path)
        return path

    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(take, range(64)))
    assert len(set(names)) == 64


def test_write_json(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    write_json(path, {"b": [1.5, "ü"], "a": None})
    assert path.read_text(encoding="utf-8") == '{\n  "a": null,\n  "b": [\n    1.5,\n    "ü"\n  ]\n}\n'
    for bad, error in (
        ({"x": float("nan")}, ValueError),
        ({"x": float("inf")}, ValueError),
        ({"x": object()}, TypeError),
    ):
        with pytest.raises(error):
            write_json(path, bad)
    assert json.loads(path.read_text(encoding="utf-8"))["b"] == [1.5, "ü"]
    write_json(path, [])
    assert path.read_text() == "[]\n"
    assert [p.name for p in tmp_path.iterdir()] == ["m.json"]


def test_write_json_removes_its_temporary(tmp_path: Path) -> None:
    (tmp_path / "m.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_json(tmp_path / "m.json", {})
    assert [p.name for p in tmp_path.iterdir()] == ["m.json"]
