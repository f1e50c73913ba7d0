"""A directory gets its name only when it is complete, whatever goes wrong."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from iobench import linux
from iobench.errors import TransferError, UsageError
from iobench.exports import staged_directory
from iobench.exports.staged_directory import StagedDirectory
from iobench.writers.local import new_file
from iobench.writers.local.directory_lock import LOCK, DirectoryLock


def write(staged: StagedDirectory, text: str, *names: str) -> None:
    for name in names:
        path = staged.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def tree(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): path.read_text()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def publish(final: Path, text: str, *names: str, keep_others: bool = False) -> None:
    staged = StagedDirectory(final)
    staged.begin()
    write(staged, text, *names)
    staged.publish(keep_others=keep_others)


def test_a_link_that_the_kernel_does_not_follow(
    sticky: Path, as_nobody: Callable[[Callable[[], None]], None]
) -> None:
    """Its destination is not replaced."""
    (sticky / "locked").mkdir(mode=0o700)
    (sticky / "link").symlink_to("locked/../victim")

    def replace() -> None:
        (sticky / "victim").mkdir()
        with pytest.raises(TransferError, match="staging: Permission denied"):
            StagedDirectory(sticky / "link")

    as_nobody(replace)


@pytest.mark.parametrize("there", [True, False])
def test_a_link_at_a_staging_name(there: bool, tmp_path: Path) -> None:
    """It is not followed: its destination stays."""
    victim = tmp_path / "victim"
    if there:
        victim.mkdir()
        (victim / "file").write_text("old")
        (victim / LOCK).touch()
    (tmp_path / ".final.abcd.iobench-staging").symlink_to(victim)
    publish(tmp_path / "final", "new", "a")
    found = {name for name in tree(tmp_path) if not name.startswith(".final")}
    assert found == {"final/a"} | ({"victim/file", f"victim/{LOCK}"} if there else set())


@pytest.mark.parametrize("exchange", [True, False])
def test_published_and_replaced(
    exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is visible before, and no old file after; with and without renameat2."""
    if not exchange:

        def refuse(one: str, other: str) -> None:
            raise OSError(errno.EINVAL, "not supported")

        monkeypatch.setattr(linux, "exchange_names", refuse)
    final = tmp_path / "new" / "last"
    staged = StagedDirectory(final)
    staged.begin()
    write(staged, "1", "a", "below/b")
    assert not final.exists()
    staged.publish()
    assert tree(tmp_path) == {"new/last/a": "1", "new/last/below/b": "1"}
    publish(final, "2", "a", "c")
    assert tree(tmp_path) == {"new/last/a": "2", "new/last/c": "2"}


@pytest.mark.parametrize("apart", [False, True])
def test_made_parents_are_synced(
    apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new directory above the checkpoint is durable under its name too."""
    synced: list[str] = []

    def spy(directory: str) -> None:
        synced.append(str(directory))

    monkeypatch.setattr(new_file, "sync_directory", spy)
    hidden = tmp_path / "a" / "hidden" if apart else None
    staged = StagedDirectory(tmp_path / "a" / "b" / "last", hidden=hidden)
    staged.begin()
    write(staged, "1", "file")
    staged.publish()
    assert synced == [str(tmp_path), str(tmp_path / "a")]


def test_what_others_make_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the save: files, directories and links. While its files are synced: new ones, also in
    a directory that was there, and replaced ones.

    What the save made takes the place of what was there, as ever.
    """
    final = tmp_path / "last"
    publish(final, "1", "a", "shards/old", "logs/x", "notes")
    (final / "link").symlink_to("nowhere")
    os.utime(final / "notes", (1, 1))
    sync, synced = staged_directory._sync_tree, []

    def slow(directory: Path) -> None:
        sync(directory)
        synced.append(directory)
        if len(synced) == 1:
            (final / "new").write_text("late")
            (final / "logs" / "y").write_text("late")
            (final / "deep").mkdir()
            (final / "deep" / "z").write_text("late")
            (final / "shards" / "stale").write_text("late")
            (final / "draft").write_text("late")
            (final / "draft").rename(final / "notes")

    monkeypatch.setattr(staged_directory, "_sync_tree", slow)
    publish(final, "2", "a", "shards/new", keep_others=True)
    late = ("new", "logs/y", "deep/z", "notes")
    assert tree(final) == {"a": "2", "shards/new": "2", "logs/x": "1"} | dict.fromkeys(late, "late")
    assert (final / "link").is_symlink()
    assert os.listdir(tmp_path) == ["last"]
    assert synced[-1] == final  # the late ones are durable too


def test_a_link_leads_to_where_it_led(tmp_path: Path) -> None:
    """`runs/last` on other storage stays there."""
    storage, link = tmp_path / "storage" / "run", tmp_path / "last"
    publish(storage, "1", "a", "notes")
    link.symlink_to(storage)
    staged = StagedDirectory(link)
    assert staged.root.parent == storage.parent
    publish(link, "2", "a", keep_others=True)
    assert link.readlink() == storage
    assert tree(storage.parent) == {"run/a": "2", "run/notes": "1"}


def test_the_directory_stays_as_it_was(tmp_path: Path) -> None:
    """Its permissions, its group for new files, and its attributes."""
    final = tmp_path / "last"
    publish(final, "1", "a", "logs/x")
    group = next((g for g in os.getgroups() if g != os.getegid()), os.getegid())
    group = 12345 if os.geteuid() == 0 else group
    os.chown(final, -1, group)
    final.chmod(0o2770)
    os.chown(final / "logs", -1, group)
    (final / "logs").chmod(0o2750)
    publish(final, "2", "a", keep_others=True)
    for name, mode in (("", 0o2770), ("logs", 0o2750)):
        found = (final / name).stat()
        assert (stat.S_IMODE(found.st_mode), found.st_gid) == (mode, group)
    assert (final / "a").stat().st_gid == group


@pytest.mark.parametrize("above", ["", "below/here"])
def test_the_working_directory_is_not_replaced(
    above: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process would continue in a removed directory."""
    final = tmp_path / "run"
    (final / above).mkdir(parents=True)
    monkeypatch.chdir(final / above)
    (tmp_path / "link").symlink_to(final)
    for named in (final, tmp_path / "link", os.path.relpath(final)):
        with pytest.raises(UsageError, match="working directory"):
            StagedDirectory(named)
    publish(final / "last", "1", "a")
    publish(tmp_path / "running", "1", "a")
    assert tree(tmp_path) == {"run/last/a": "1", "running/a": "1"}


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("failing", ["last", "run", "listing"])
def test_a_failure_leaves_what_was_there(
    failing: str, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the new directory cannot be synced or listed, or at last the one that it is in."""
    final = tmp_path / "run" / "last"
    if there:
        publish(final, "1", "a")
    staged = StagedDirectory(final)
    staged.begin()
    write(staged, "2", "a")

    def fail(path: Path) -> None:
        if Path(path).name == failing:
            raise OSError(errno.EIO, "Input/output error")

    def no_listing(path: Path) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(staged_directory, "sync_directory", fail)
        if failing == "listing":
            patch.setattr(os, "scandir", no_listing)
        with pytest.raises(TransferError, match="publishing"):
            staged.publish()
    staged.discard()
    assert tree(tmp_path) == ({"run/last/a": "1"} if there else {})


_SAVE = """
import os, sys
from iobench.exports.staged_directory import StagedDirectory
final, text = sys.argv[1:]
for order in sys.stdin:
    if order == "begin\\n":
        staged = StagedDirectory(final)
        staged.begin()
        staged.path.mkdir(exist_ok=True)
        for name in ("a", "b"):
            (staged.path / name).write_text(text)
    elif order == "publish\\n":
        staged.publish()
    else:
        os.kill(os.getpid(), 9)
    print(flush=True)
"""


@contextmanager
def saver(final: Path, text: str) -> Iterator[Callable[[str], None]]:
    """A process that saves two files of `text`; yields what gives it an order and waits."""
    with subprocess.Popen(
        [sys.executable, "-c", _SAVE, final, text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def order(what: str) -> None:
            print(what, file=process.stdin, flush=True)
            assert process.stdout.readline() or what == "die"

        yield order
        process.stdin.close()


def test_killed_saves_are_cleared(tmp_path: Path) -> None:
    """Incomplete files of a killed process do not get into the next directory, and go."""
    final = tmp_path / "last"
    with saver(final, "half") as order:
        order("begin")
        order("die")
    (left,) = os.listdir(tmp_path)
    assert left.endswith(".iobench-staging")
    publish(final, "1", "c")
    assert os.listdir(tmp_path) == ["last"]
    assert tree(tmp_path) == {"last/c": "1"}


def test_killed_while_a_directory_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock goes last: what is left is removed by the next save, and so is an empty one. Others
    stay."""
    staged = StagedDirectory(tmp_path / "final")
    staged.begin()
    write(staged, "1", "a", "below/b")
    (staged.root / "replaced").write_text("old")
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            staged.discard()
    left = {*tree(tmp_path)}
    assert {f"{staged.root.name}/{name}" for name in (LOCK, "final/a", "final/below/b")} == left
    (tmp_path / ".final.0000.iobench-staging").mkdir()
    (tmp_path / ".final.1111.iobench-staging").mkdir()
    (tmp_path / ".final.1111.iobench-staging/theirs").touch()
    publish(tmp_path / "final", "2", "a")
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        ".final.1111.iobench-staging",
        "final",
    ]


@pytest.mark.parametrize("method", ["__init__", "check"])
def test_an_interrupt_while_it_begins(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C just after the hidden directory is made, or just after it is locked."""
    real = getattr(DirectoryLock, method)

    def interrupted(*given: object) -> None:
        real(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(DirectoryLock, method, interrupted)
    staged = StagedDirectory(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        staged.begin()
    staged.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_hidden_directory_of_another_process(tmp_path: Path) -> None:
    """It is not removed by the process that did not make it."""
    first, second = (StagedDirectory(tmp_path / "out", token="same") for _ in range(2))
    first.begin()
    with pytest.raises(TransferError, match="exists"):
        second.begin()
    second.discard()
    assert first.root.is_dir()
    first.discard()


@pytest.mark.parametrize("there", [True, False])
def test_two_processes_save_to_one_name(there: bool, tmp_path: Path) -> None:
    """Neither touches the running save of the other; the last one to publish is what stays."""
    final = tmp_path / "last"
    if there:
        publish(final, "0", "a", "b")
    with saver(final, "1") as one, saver(final, "2") as other:
        one("begin")
        other("begin")
        one("publish")
        assert tree(final) == {"a": "1", "b": "1"}
        one("begin")
        other("publish")
        assert tree(final) == {"a": "2", "b": "2"}
        one("publish")
    assert tree(tmp_path) == {"last/a": "1", "last/b": "1"}
    assert os.listdir(tmp_path) == ["last"]


@pytest.mark.slow
def test_many_saves_to_one_name_at_the_same_time(tmp_path: Path) -> None:
    """Whichever interleaving there is: each save succeeds, the result is one of them, whole."""
    final, code = (
        tmp_path / "last",
        f"""
import sys
from pathlib import Path
from iobench.exports.staged_directory import StagedDirectory
for number in range(60):
    staged = StagedDirectory({str(tmp_path / "last")!r})
    staged.begin()
    staged.path.mkdir(exist_ok=True)
    for name in ("a", "b"):
        (staged.path / name).write_text(f"{{sys.argv[1]}} {{number}}")
    staged.publish()
""",
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, str(n)]) for n in range(3)]
    assert [process.wait(100) for process in processes] == [0, 0, 0]
    found = tree(final)
    assert found["a"] == found["b"]
    assert found["a"].endswith(" 59")
    assert os.listdir(tmp_path) == ["last"]


@pytest.mark.root
def test_a_directory_on_fuse(shared_filesystems: Callable[..., Path], tmp_path: Path) -> None:
    """libfuse hides the file of the lock while it is open, and nothing stays."""
    final = shared_filesystems("fuse") / tmp_path.name / "last"
    for text in ("1", "2"):
        publish(final, text, "a")
    assert tree(final.parent) == {"last/a": "2"}
    assert os.listdir(final.parent) == ["last"]
