"""Directories are written whole or not at all; errors name the path."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError

from kvasir.model.platform.files import in_words, new_directory, read_limited, writing

FULL = os.strerror(errno.ENOSPC)


def test_folders_of_others_stay_as_they_are(tmp_path: Path) -> None:
    """Once OUT.part was removed, whoever owned it."""
    theirs = tmp_path / "out.part" / "notes"
    theirs.parent.mkdir()
    theirs.write_text("mine")
    with new_directory(tmp_path / "out") as part:
        (part / "file").touch()
    assert theirs.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.part"]


def test_it_can_be_read_by_whom_folders_are_read(tmp_path: Path) -> None:
    (tmp_path / "usual").mkdir()
    with new_directory(tmp_path / "out"):
        pass
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("there", [False, True])
def test_a_failure_leaves_what_was_there(there: bool, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    if there:
        out.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ZeroDivisionError), new_directory(out) as part:
        (part / "file").write_text(str(1 / 0))
    assert sorted(tmp_path.rglob("*")) == before


def test_only_what_is_named_is_replaced_and_only_by_what_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "deep").mkdir(parents=True)
    (out / "deep/old").touch()
    with pytest.raises(FileExistsError, match="has no mark"), new_directory(out, "mark"):
        pass
    (out / "mark").touch()
    with pytest.raises(ZeroDivisionError), new_directory(out, "mark") as part:
        (part / "new").write_text(str(1 / 0))
    assert sorted(path.name for path in out.rglob("*")) == ["deep", "mark", "old"]
    with new_directory(out, "mark") as part:
        (part / "new").touch()
        assert (out / "deep/old").exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "new"]


def test_where_it_is_written_meanwhile_is_not_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, new_directory(tmp_path / "out") as part:
        (part / "absent" / "file").touch()
    assert in_words(caught.value) == f"{tmp_path}/out: no such file or directory"


def test_the_folder_one_is_in_cannot_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileExistsError, match="name a new folder"), new_directory(Path()):
        pass


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="only some systems have a device that is always full"
)
def test_a_full_disk_is_named_where_numpy_does_not(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match=FULL) as caught,
        writing(tmp_path),
        Path("/dev/full").open("wb") as file,
    ):
        np.zeros(100_000).tofile(file)
    assert in_words(caught.value) == f"{tmp_path}: no space left on device"


def test_a_full_disk_is_named_where_safetensors_does_not(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=FULL) as caught, writing(tmp_path):
        raise SafetensorError(
            f"Error while serializing: I/O error: {FULL} (os error {errno.ENOSPC})"
        )
    assert in_words(caught.value) == f"{tmp_path}: no space left on device"


def test_what_has_a_path_or_is_no_matter_of_files_stays_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, writing(tmp_path):
        (tmp_path / "absent" / "file").touch()
    assert in_words(caught.value) == f"{tmp_path}/absent/file: no such file or directory"
    with pytest.raises(SafetensorError, match="too short"), writing(tmp_path):
        raise SafetensorError("header too short")
    assert in_words(FileExistsError("out is not empty")) == "out is not empty"


def test_a_pipe_is_no_file_of_others(tmp_path: Path) -> None:
    """Reading one, such as among adapters, would never end."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        read_limited(tmp_path / "pipe")
