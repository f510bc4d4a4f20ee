"""Keys from the setting and from a file, which may change at any time and in any way."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from kvasir.server.api.http.keys import LARGEST_FILE, ApiKeys
from kvasir.server.errors import StartupError
from kvasir.server.requests.admission.callers import Caller


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("first\n")
    return path


def write(path: Path, text: str) -> None:
    path.write_text(text)


def remove(path: Path) -> None:
    path.unlink()


async def known(keys: ApiKeys, *candidates: str) -> list[str]:
    return [key for key in candidates if await keys.find(key.encode()) is not None]


async def caller(keys: ApiKeys, key: str) -> Caller:
    found = await keys.find(key.encode())
    assert found is not None
    return found


async def test_keys_come_from_the_setting_and_from_a_file(path: Path) -> None:
    write(path, "# for the team\ntwo\n\n  three \r\n#four\n\u00fcnf\n")
    keys = ApiKeys("one", path)
    others = ("four", "#four", "tw", "twoo", "", "# for the team", "TWO")
    candidates = ("one", "two", "three", "\u00fcnf", *others)
    assert await known(keys, *candidates) == ["one", "two", "three", "\u00fcnf"]


async def test_keys_are_told_apart_and_not_shown(path: Path) -> None:
    write(path, "two\nthree\n")
    keys = ApiKeys("one", path)
    names = [await keys.find(key) for key in (b"one", b"two", b"three", b"two")]
    assert names[1] == names[3]
    assert len(set(names)) == 3
    again = await caller(ApiKeys("one"), "one")  # digests cannot be computed in advance
    assert again.salt != (await caller(keys, "one")).salt
    shown = str(vars(keys))
    assert not any(key in shown for key in ("'one'", "two", "three"))


async def test_replicas_with_one_salt_know_a_key_as_the_same_caller(path: Path) -> None:
    write(path, "name=a two\nthree\n")
    salts = {
        salt: [
            (await caller(ApiKeys("one", path, salt), key)).salt for key in ("one", "two", "three")
        ]
        for salt in ("a" * 16, "b" * 16)
    }
    again = ApiKeys("one", path, "a" * 16)
    assert [(await caller(again, key)).salt for key in ("one", "two", "three")] == salts["a" * 16]
    assert len({*salts["a" * 16], *salts["b" * 16]}) == 6
    with pytest.raises(StartupError, match="salt: it has 15 characters"):
        ApiKeys("one", path, "c" * 15)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n# none\n", "no key"),
        (b"one two\n", "line 1.* no space"),
        (b"\nname=a tokens=3 one\n", "line 2.* tokens_per_minute=N"),
        (b"name=a name=b one\n", "line 1"),
        (b"name= one\n", "line 1"),
        (b'name=a"} one\n', "line 1"),
        (b"name=\xff one\n", "line 1"),
        (b"concurrency=0 one\n", "line 1"),
        (b"concurrency=-1 one\n", "line 1"),
        (b"tokens_per_minute=1e9 one\n", "line 1"),
        (b"tokens_per_minute=9999999999 one\n", "line 1"),
        (b"name=a concurrency=2\n", "line 1: there is no key"),
        (b"name=a concurrency=2 one\nname=a two\n", "line 2: an earlier line"),
        (b"one\0two\n", "a control character"),
        (b"x" * (LARGEST_FILE + 1), "more than 1048576"),
    ],
)
def test_a_file_without_keys_does_not_leave_the_server_open(
    path: Path, content: bytes, message: str
) -> None:
    path.write_bytes(content)
    with pytest.raises(StartupError, match=message) as caught:
        ApiKeys("also", path)
    assert "one two" not in str(caught.value)
    with pytest.raises(StartupError, match="no such file"):
        ApiKeys(None, path.with_name("nothing"))


@pytest.mark.parametrize("key", ["my secret", "my\x0bsecret", "secret\x7f", " \n"])
def test_a_key_that_no_client_could_send_is_refused(key: str) -> None:
    with pytest.raises(StartupError, match="api_key: ") as caught:
        ApiKeys(key)
    assert "secret" not in str(caught.value)


async def test_bom_and_space_around_keys_are_dropped(path: Path) -> None:
    write(path, "\ufefffirst\r\nsecond \t\n")
    keys = ("first", "second", "third")
    assert await known(ApiKeys(" third\n", path), *keys) == [*keys]


async def test_keys_have_names_and_limits_that_never_show_a_key(path: Path) -> None:
    """Keys of one name are one caller; a `=` in a key is part of it."""
    lines = ["*\tconcurrency=7", "name=alice tokens_per_minute=500 one==", "", "two"]
    lines += ["concurrency=3 three", "tokens_per_minute=500  name=alice\tfour", "*", "five"]
    write(path, "\n".join(lines))
    keys = ApiKeys("zero", path)
    found = [await caller(keys, key) for key in ("zero", "one==", "two", "three", "four", "five")]
    assert [(one.name, one.concurrency, one.tokens_per_minute) for one in found] == [
        ("default", None, None),
        ("alice", 7, 500),
        ("line-4", 7, None),
        ("line-5", 3, None),
        ("alice", 7, 500),
        ("line-8", None, None),
    ]
    assert found[1] is found[4]
    assert len({one.salt for one in found}) == 5


async def test_a_key_that_is_called_like_anothers_name_is_not_its_caller(path: Path) -> None:
    write(path, "name=alice one\nalice\nname=line-2 two\n")
    keys = ApiKeys(None, path)
    assert len({(await caller(keys, key)).salt for key in ("one", "alice", "two")}) == 3


async def test_a_caller_keeps_what_it_has_used_when_its_file_changes(path: Path) -> None:
    """Its key may change, its line move, and its limits be others from then on."""
    write(path, "name=alice tokens_per_minute=500 one\ntwo\n")
    keys = ApiKeys(None, path)
    alice, second = [await caller(keys, key) for key in ("one", "two")]
    write(path, "# moved\ntwo\nname=alice concurrency=9 new-key\n")
    assert await caller(keys, "two") is second
    assert await caller(keys, "new-key") is alice
    assert (second.name, alice.concurrency, alice.tokens_per_minute) == ("line-2", 9, None)
    assert await known(keys, "one") == []
    write(path, "name=alice concurrency=1 one\nname=alice concurrency=2 two-longer\n")
    assert await known(keys, "one", "new-key") == ["new-key"]  # a bad file changes nothing
    assert alice.concurrency == 9


async def test_a_changed_file_counts_from_the_next_request_on(path: Path) -> None:
    keys = ApiKeys("fixed", path)
    assert await known(keys, "fixed", "first", "second") == ["fixed", "first"]
    write(path, "second-longer\n")
    assert await known(keys, "fixed", "first", "second-longer") == ["fixed", "second-longer"]


async def test_a_link_that_is_swapped_is_a_change(tmp_path: Path) -> None:
    """As Kubernetes publishes a new secret: sizes and the link's name stay."""
    versions = [tmp_path / name for name in ("v1", "v2")]
    for version in versions:
        version.mkdir()
        (version / "keys").write_text(f"key-{version.name}\n")
    current, fresh = tmp_path / "data", tmp_path / "data_tmp"
    current.symlink_to(versions[0])
    keys = ApiKeys(None, current / "keys")
    assert await known(keys, "key-v1", "key-v2") == ["key-v1"]
    fresh.symlink_to(versions[1])
    fresh.rename(current)
    assert await known(keys, "key-v1", "key-v2") == ["key-v2"]


async def test_a_file_that_gives_no_keys_keeps_the_old_ones_and_is_told_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ApiKeys(None, path)
    with caplog.at_level(logging.ERROR, logger="kvasir"):
        write(path, "")
        assert await known(keys, *["first"] * 5) == ["first"] * 5
        remove(path)
        assert await known(keys, *["first"] * 5) == ["first"] * 5
        write(path, "secret with spaces")
        assert await known(keys, *["first"] * 5) == ["first"] * 5
        assert keys.has_failed
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 3
    assert "secret" not in caplog.text
    write(path, "second\n")
    assert await known(keys, "first", "second") == ["second"]
    assert not keys.has_failed


async def test_concurrent_requests_read_a_changed_file_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ApiKeys(None, path)
    write(path, "")
    with caplog.at_level(logging.ERROR, logger="kvasir"):
        assert None not in await asyncio.gather(*(keys.find(b"first") for _ in range(20)))
    assert len(caplog.records) == 1
    write(path, "second\n")
    assert None not in await asyncio.gather(*(keys.find(b"second") for _ in range(20)))


async def test_a_change_is_not_lost_with_the_request_that_noticed_it(path: Path) -> None:
    keys = ApiKeys(None, path)
    write(path, "second\n")
    noticing = asyncio.create_task(keys.find(b"first"))
    await asyncio.sleep(0)
    noticing.cancel()
    await asyncio.gather(noticing, return_exceptions=True)
    assert await known(keys, "first", "second") == ["second"]
