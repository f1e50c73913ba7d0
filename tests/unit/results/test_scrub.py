"""An anonymised copy has the same figures, and none of the values that it lists as removed."""

from __future__ import annotations

import errno
import json
import os
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cli import app
from typer.testing import CliRunner

from iobench.bench.axes import Axes
from iobench.errors import ResultFileError, TransferError
from iobench.results import ResultFile, read
from iobench.results.codec import to_plain
from iobench.results.scrub import Scrubbed, scrub, write_scrubbed
from iobench.tune.journal import read_journal
from iobench.writers import registry

_EXAMPLE = Path(__file__).with_name("example.jsonl").read_bytes().splitlines()
_REFERENCES = Path(__file__).parents[3] / "results"
_PLACES = {"path", "mount_point", "source", "target", "backing_file", "floor_record"}
_FAILURE = {
    "schema": "iobench.result/1",
    "kind": "failure",
    "repetition": 1,
    "order": 9,
    "run_id": json.loads(_EXAMPLE[0])["run_id"],
    "writer": "odirect",
    "options": {},
    "operation": "save",
    "started_at": "2026-01-31T12:03:00.000Z",
}


def changed(
    machine: dict[str, Any] | None = None,
    storage: dict[str, Any] | None = None,
    command: list[str] | None = None,
    error: str | None = None,
) -> list[bytes]:
    """The lines of the example with other facts, and with a failure if `error` is given."""
    header, *others = map(json.loads, _EXAMPLE)
    header["environment"]["machine"] |= machine or {}
    header["environment"]["storage"] |= storage or {}
    header["command"] = command or []
    header["plan"]["verb"] = "train"
    failures = [] if error is None else [_FAILURE | {"error": error}]
    records = [header, *others[:-1], *failures, others[-1]]
    return [f"{json.dumps(one)}\n".encode() for one in records]


def _name(option: str) -> str:
    return option.partition("=")[0]


def texts(scrubbed: Scrubbed) -> str:
    """All of the copy, with non-ASCII characters as such."""
    parsed = [json.loads(line) for line in scrubbed.lines]
    return json.dumps(parsed, ensure_ascii=False) + b"".join(scrubbed.lines).decode()


_NAME = st.text(string.ascii_lowercase + "é_", min_size=4, max_size=8).map("zq{}".format)
_PARTS = st.text(string.ascii_letters + string.digits + "_é.-", min_size=1, max_size=8)
_PATH = st.lists(_PARTS, min_size=1, max_size=3).map(lambda parts: "/zx" + "/".join(parts))


@given(host=_NAME, user=_NAME, target=_PATH, mount=_PATH, output=_PATH, server=_NAME)
def test_nothing_removed_is_left(
    host: str, user: str, target: str, mount: str, output: str, server: str
) -> None:
    """Names and paths are removed wherever they occur: in fields, options and errors."""
    lines = changed(
        machine={"hostname": f"{host}.zqcorp.example"},
        storage={
            "path": f"{target}/my disk",
            "mount_point": mount,
            "source": f"{server}:/home/{user}",
            "mount_options": ["rw", "vers=4.2", f"username={user}", "addr=10.1.2.3", "uid=1007"],
            "device": {"name": "nvme0n1", "backing_file": f"{output}.img", "serial": "S3R1AL"},
        },
        command=["iobench", "run", f"{output}/my.yaml", "-o", "zqrun.jsonl", f"--target={target}"],
        error=f"OSError: '{target}/my disk/a b': full; {mount}/x, see s3://zqbucket/{user} and "
        f"http://{server}:9000/zqbucket on {host} (10.1.2.4, fe80::12) of {user}",
    )
    copy = scrub(lines)
    olds = {one.old for one in copy.removed}
    assert {f"{target}/my disk", mount, "username=" + user, "addr=10.1.2.3", "10.1.2.4"} <= olds
    assert {f"{server}:/home/{user}", '"S3R1AL"', "zqrun.jsonl", "fe80::12", host, user} <= olds
    left = texts(copy)
    secrets = (host, user, target, mount, output, server, "zqcorp", "zqbucket", "1007", "S3R1AL")
    for secret in (*olds, *secrets):
        assert secret not in left, secret
        assert json.dumps(secret)[1:-1] not in left
    assert '"vers=4.2"' in left
    assert '"nvme0n1"' in left
    assert copy.lines[1:-2] == tuple(lines[1:-2])


@given(
    word=st.sampled_from(["run", "sample", "save", "odirect", "vm", "gather", "e", "direct", "1"])
)
def test_a_host_may_be_called_like_a_word_of_the_record(word: str) -> None:
    """Only its field changes then: the record still loads, with the same samples."""
    lines = changed(machine={"hostname": word})
    copy = scrub(lines)
    assert json.loads(copy.lines[0])["environment"]["machine"]["hostname"] == "host"
    assert copy.lines[1:] == tuple(lines[1:])


def test_the_words_of_a_command_keep_their_options() -> None:
    """Only words that iobench does not have change."""
    given = ["--writer", "s3,endpoint_url=https://minio.zq:9000,threads=4", "--target", "train,zqd"]
    given += ["--baseline=odirect target=/mnt/zq,1", "-w", "zq model.yaml"]
    header = json.loads(scrub(changed(command=given)).lines[0])
    assert header["command"] == [
        *("--writer", "s3,endpoint_url=removed,threads=4", "--target", "train,removed2"),
        *("--baseline=odirect target=removed3,1", "-w", "removed4 removed5"),
    ]


def test_what_says_nothing_about_the_owner_stays() -> None:
    lines = changed(
        machine={"hostname": "localhost", "versions": {"cufile": "1.2.3.4"}},
        storage={
            "path": "/",
            "mount_point": "/",
            "source": "/dev/nvme0n1p2",
            "mount_options": ["rw", "errors=remount-ro", "stripe=64"],
            "endpoint": "https://s3.eu-west-1.amazonaws.com",
        },
        command=["iobench", "run", "llama7b", "--granularity", "shard=5GB", "--target", "."],
        error="/proc/sys/kernel/io_uring_disabled is 2; 2.1 GiB/s, 1/2 of the width, 12:30:05",
    )
    copy = scrub(lines)
    assert [(one.where, one.old) for one in copy.removed] == [
        ("environment.machine.hostname", "localhost")
    ]
    assert copy.lines[1:] == tuple(lines[1:])


@pytest.mark.parametrize(
    ("error", "cleaned"),
    [
        ("mount zqnas:/export/jane failed on zqnas", "mount removed failed on removed2"),
        ("server zqnas.lab not found, 10.1.2.3", "server removed not found, removed2"),
        ("full: '/mnt/zq Disk/jane 1/x.pt' is gone", "full: 'removed removed2 removed3' is gone"),
        ("rank 1 (host zqhost.zqcorp.example, '?') failed", "rank 1 (host host, '?') failed"),
        ("00:11:22:33:44:55 is not 1:30:05, see zq@x.org", "removed is not 1:30:05, see removed2"),
        ("uid 1007: jane@zqgpu18:29500 4jane -jane", "uid 1007: removed removed2 removed3"),
    ],
)
def test_names_that_only_a_message_has(error: str, cleaned: str) -> None:
    """Servers, paths, addresses and people, wherever a message has them."""
    lines = changed(machine={"hostname": "zqhost.zqcorp.example"}, error=error)
    once = scrub(lines)
    (found,) = [json.loads(line)["error"] for line in once.lines if b'"failure"' in line]
    assert found == cleaned
    assert scrub(once.lines).lines == once.lines


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda run: run["plan"].update(token="zq"), "plan.token"),
        (lambda run: run["environment"]["machine"].update(owner={"zq": 1}), "machine.owner"),
        (lambda run: run["environment"]["machine"]["versions"].update(zq="a b"), "versions.zq"),
        (lambda run: run["plan"].update(writers=[{"options": {"key": "zq"}}]), "writers.options"),
        (lambda run: run["plan"].update(files=[{"path": "zq"}], workload="mine"), "plan.files"),
        (lambda run: run.update(secret="zq"), "secret"),
        (lambda run: run["environment"].update(mail={"zq": 1}), "environment.mail"),
    ],
)
def test_a_field_that_is_not_known_does_not_leave(
    change: Callable[[dict[str, Any]], None], field: str, tmp_path: Path
) -> None:
    """The copy loads without it, or without its text; the list of what was removed has it."""
    header, *others = changed()
    values = json.loads(header)
    change(values)
    record, copy = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    record.write_bytes(f"{json.dumps(values)}\n".encode() + b"".join(others))
    removed = write_scrubbed(record, copy, read)
    assert "zq" not in copy.read_text()
    assert [one.where for one in removed if "zq" in one.old and field in one.where]


@pytest.mark.parametrize("name", registry.names())
def test_the_options_of_our_writers_stay(name: str) -> None:
    options = registry.writer_class(name).Options()
    values = {"plan": {"writers": [{"name": name, "options": to_plain(options)}]}}
    line = json.dumps(values).encode()
    assert scrub([line]).lines == (line,)


def test_all_axes_are_known() -> None:
    axes = Axes(
        restore_modes=("all",),
        slices=("2",),
        numjobs=(1, 2),
        targets=("a", "b"),
        backgrounds=(None, "restore"),
    )
    line = json.dumps({"plan": axes.to_dict()} | {"note": ""}).encode()
    assert json.loads(scrub([line]).lines[0])["plan"].keys() == axes.to_dict().keys()


def test_options_of_another_package_may_be_numbers(tmp_path: Path) -> None:
    """A number or a switch does not identify a person."""
    lines = changed()
    values = json.loads(lines[0])
    values["plan"]["writers"] = [{"name": "other", "options": {"depth": 4, "fast": True}}]
    record, copy = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    record.write_bytes(f"{json.dumps(values)}\n".encode() + b"".join(lines[1:]))
    write_scrubbed(record, copy, read)
    assert read(copy).run.plan["writers"] == values["plan"]["writers"]


def test_several_targets_stay_apart(tmp_path: Path) -> None:
    """Equal paths get equal names, also as keys; the copy loads."""
    header, first, *_ = [json.loads(line) for line in (_EXAMPLE[0], _EXAMPLE[3])]
    storage = header["environment"]["storage"]
    header["environment"] |= {
        "storages": {path: storage | {"path": path} for path in ("/mnt/b", "/mnt/a")},
        "storage": {},
    }
    record, copy = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    record.write_text(f"{json.dumps(header)}\n{json.dumps(first | {'target': '/mnt/a'})}\n")
    write_scrubbed(record, copy, read)
    result = read(copy)
    assert list(result.run.environment.storages) == ["/path", "/path2"]
    assert [one.axes.target for one in result.samples] == ["/path2"]


@pytest.mark.parametrize("path", sorted(_REFERENCES.glob("reference-*.jsonl")), ids=str)
def test_published_records_load_again(path: Path, tmp_path: Path) -> None:
    """Only the names of this machine are not in it; a copy of the copy is the copy."""
    copy, again = tmp_path / "copy.jsonl", tmp_path / "again.jsonl"
    answer = CliRunner().invoke(app, ["results", "scrub", str(path), "-o", str(copy)])
    assert answer.exit_code == 0, answer.exception
    assert "machine.hostname" in answer.stdout
    check = read_journal if "autotune" in path.name else read
    assert write_scrubbed(copy, again, check) == ()
    lines, published = copy.read_bytes().splitlines(), path.read_bytes().splitlines()
    assert again.read_bytes() == copy.read_bytes()
    assert lines[1:] == published[1:]
    after, before = json.loads(lines[0]), json.loads(published[0])
    for one in (after, before):
        facts = one.get("environment", one)
        facts["machine"]["hostname"] = facts["machine"]["gds"]["cufile"] = one["command"] = None
        facts["storage"]["mount_options"] = [*map(_name, facts["storage"]["mount_options"])]
        for place in (
            facts["storage"],
            facts["storage"]["device"],
            one.get("asked") or one["plan"],
        ):
            place.update(dict.fromkeys(_PLACES & place.keys()))
    assert after == before


def test_the_record_stays_and_no_file_is_replaced(tmp_path: Path, example: ResultFile) -> None:
    """An output that exists, a bad record and a copy that does not load leave no copy."""
    copy = tmp_path / "copy.jsonl"
    for bad in (tmp_path / "missing.jsonl", Path(__file__)):
        with pytest.raises(ResultFileError):
            write_scrubbed(bad, copy, read)
    with pytest.raises(ResultFileError, match="exists and is not overwritten"):
        write_scrubbed(example.path, example.path, read)

    def refuse(path: Path) -> None:
        if path == copy:
            raise ResultFileError("no")

    with pytest.raises(ResultFileError):
        write_scrubbed(example.path, copy, refuse)
    assert not copy.exists()
    with pytest.raises(ResultFileError, match="cannot be written: File exists"):
        write_scrubbed(example.path, copy, lambda _: copy.touch())  # meanwhile, by somebody
    assert copy.exists()
    assert example.path.read_bytes().splitlines() == _EXAMPLE


def test_a_killed_tuning_has_an_unfinished_line(tmp_path: Path) -> None:
    journal, copy = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    whole = (_REFERENCES / "benchmarks" / "autotune-grid.jsonl").read_bytes()
    journal.write_bytes(whole[: whole.index(b"\n") + 200])
    write_scrubbed(journal, copy, read_journal)
    assert read_journal(copy)[1] == []


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_no_copy(
    tmp_path: Path,
    example: ResultFile,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    """A full disk is one error with the name of the copy; Ctrl-C stays Ctrl-C."""
    copy = tmp_path / "copy.jsonl"
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=error))
    with pytest.raises((TransferError, KeyboardInterrupt)) as raised:
        write_scrubbed(example.path, copy, read)
    if isinstance(error, OSError):
        assert "writing: No space left" in str(raised.value)
        assert str(copy) in str(raised.value)
    assert not copy.exists()


def test_the_hosts_of_ranks() -> None:
    """Each is replaced wherever it occurs, also in a message about a rank."""
    lines = changed(error="JobError: rank 1 (host zqnode07): OSError: disk full")
    header = json.loads(lines[0])
    header["world"] = {
        "launcher": "slurm",
        "hosts": ["zqnode03", "zqnode07"],
        "interface": "eth0 (10.1.2.3, the route to zqnode03)",
    }
    copy = scrub([f"{json.dumps(header)}\n".encode(), *lines[1:]])
    assert json.loads(copy.lines[0])["world"]["hosts"] == ["host2", "host3"]
    assert json.loads(copy.lines[0])["world"]["launcher"] == "slurm"
    assert "rank 1 (host host3): OSError" in texts(copy)
    assert "zqnode" not in texts(copy)
    assert "10.1.2.3" not in texts(copy)
