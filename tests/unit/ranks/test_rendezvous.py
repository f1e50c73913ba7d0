"""meet: only a file of this user that no other may read has the secret of the ranks."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.ranks import free_port
from torch.distributed import HashStore

from iobench.errors import RankError, UsageError
from iobench.ranks import rendezvous
from iobench.ranks.hub import Hub
from iobench.ranks.rendezvous import Meeting, meet
from iobench.ranks.world import OWN, World

_WORLD = replace(
    World.single(), size=2, nodes=2, job="4711.0", launcher="slurm", master="192.0.2.1"
)


def _rank(number: int) -> World:
    return replace(World.single(), rank=number, size=2, local_size=2, local_rank=number, job="7")


@contextmanager
def _met(directory: Path, environ: Mapping[str, str] | None = None) -> Iterator[Meeting]:
    found = {"IOBENCH_STORE": str(directory), **(environ or {})}
    meeting = meet(_rank(0), deadline_s=1, environ=found)
    assert meeting.server is not None
    with meeting.server:
        yield meeting


def _other(directory: Path, deadline_s: float = 0.01, **environ: str) -> Meeting:
    return meet(
        _rank(1), deadline_s=deadline_s, environ={"IOBENCH_STORE": str(directory), **environ}
    )


def test_the_secret_is_random_and_private(tmp_path: Path) -> None:
    """It does not follow from the number of the job, and the file is of mode 600."""
    tokens = set()
    for _ in range(2):
        with _met(tmp_path) as meeting:
            (file,) = tmp_path.iterdir()
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            assert _other(tmp_path).token == meeting.token
            tokens.add(meeting.token)
            meeting.withdraw()
            assert not list(tmp_path.iterdir())
    assert len(tokens) == 2


@pytest.mark.parametrize("how", ["user", "mode", "link", "text"])
def test_a_file_of_another_user(tmp_path: Path, how: str) -> None:
    """A planted file is refused, unless IOBENCH_TOKEN is the secret; so is one that is not an
    address."""
    with _met(tmp_path):
        (file,) = tmp_path.iterdir()
        if how == "mode":
            file.chmod(0o640)
        elif how == "text":
            file.write_text("{")
            with pytest.raises(UsageError, match="is not the address of a rank 0; remove it"):
                _other(tmp_path)
            return
        elif how == "link":
            file.rename(tmp_path / "planted")
            file.symlink_to(tmp_path / "planted")
            with pytest.raises(OSError, match="Too many levels of symbolic links"):
                _other(tmp_path)
            return
        elif os.geteuid() == 0:
            os.chown(file, 65534, -1)
        else:
            pytest.skip("only root may give a file to another user")
        with pytest.raises(UsageError, match="it must be 600 and of user"):
            _other(tmp_path)
        assert _other(tmp_path, IOBENCH_TOKEN="secret").token == "secret"


def test_a_rank_0_that_never_comes(tmp_path: Path) -> None:
    """The message says what must be the same directory."""
    with pytest.raises(RankError, match=r"did not publish its address in .* all nodes must see"):
        _other(tmp_path)


def test_another_job_of_the_same_name(tmp_path: Path) -> None:
    """Its rank 0 is refused while the first one waits for its ranks, and not after a kill."""
    with ExitStack() as stack:
        first = stack.enter_context(_met(tmp_path))
        assert first.server is not None
        hub = Hub(first.server, size=2, token=first.token, host="here", lost_after_s=5)
        try:
            with pytest.raises(UsageError, match="another job of this name begins now"):
                stack.enter_context(_met(tmp_path))
            assert _other(tmp_path).address == first.address
        finally:
            hub.abandon("the test ends")
        second = stack.enter_context(_met(tmp_path))
        assert _other(tmp_path).address == second.address


def test_another_program_at_the_port_of_a_killed_start(tmp_path: Path) -> None:
    """It may be a hub too, that of a job of another name: the new start goes on."""
    with ExitStack() as stack:
        killed = stack.enter_context(_met(tmp_path))
        assert killed.server is not None
        hub = Hub(killed.server, size=2, token="another", host="here", lost_after_s=5)
        try:
            second = stack.enter_context(_met(tmp_path))
        finally:
            hub.abandon("the test ends")
        assert _other(tmp_path).address == second.address


def test_two_jobs_at_one_port() -> None:
    """Whoever comes second is told, however soon: both could bind it before one listens."""
    environ = {"IOBENCH_STORE": f"tcp://127.0.0.1:{free_port()}", "IOBENCH_TOKEN": "secret"}
    meeting = meet(_rank(0), deadline_s=1, environ=environ)
    assert meeting.server is not None
    with meeting.server, pytest.raises(UsageError, match="rank 0 cannot listen on"):
        meet(_rank(0), deadline_s=1, environ=environ)


def test_no_secret_in_common() -> None:
    """Several nodes without a store or a directory: the message says what to set."""
    message = "set IOBENCH_STORE to a directory that all nodes share, or to tcp://HOST:PORT"
    with pytest.raises(UsageError, match=message):
        meet(_WORLD, deadline_s=1, environ={})
    with pytest.raises(UsageError, match=r"tcp://192.0.2.1:9: needs IOBENCH_TOKEN"):
        meet(_WORLD, deadline_s=1, environ={"IOBENCH_STORE": "tcp://192.0.2.1:9"})


def test_one_node_needs_no_setting(tmp_path: Path) -> None:
    """The secret is in the user's own directory of the node, which no other user may enter."""
    environ = {"IOBENCH_RUNTIME": str(tmp_path / "own")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IOBENCH_RUNTIME", environ["IOBENCH_RUNTIME"])
        meeting = meet(_rank(0), deadline_s=1, environ={})
        assert meeting.server is not None
        with meeting.server:
            assert meet(_rank(1), deadline_s=1, environ={}).token == meeting.token
            assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o700
            (file,) = (tmp_path / "own").iterdir()
            assert json.loads(file.read_text())["token"] == meeting.token
        meeting.withdraw()


def test_two_jobs_of_one_name_with_process_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each meets at its own store: `init_method="file://..."` gives a job no name and no port."""
    monkeypatch.setenv("IOBENCH_RUNTIME", str(tmp_path / "own"))
    stores, meetings = [HashStore(), HashStore()], list[Meeting]()
    with ExitStack() as stack:
        for store in stores:
            monkeypatch.setattr(rendezvous, "_store_of_trainer", lambda store=store: store)
            meetings.append(meet(_rank(0), deadline_s=1, environ={}))
            assert meetings[-1].server is not None
            stack.enter_context(meetings[-1].server)
        for store, meeting in zip(stores, meetings, strict=True):
            monkeypatch.setattr(rendezvous, "_store_of_trainer", lambda store=store: store)
            other = meet(_rank(1), deadline_s=1, environ={})
            assert (other.address, other.token) == (meeting.address, meeting.token)
            meeting.withdraw()
            assert store.num_keys() == 0


def test_the_ranks_of_a_run_itself_need_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a job of several nodes do not apply: it would listen on another host. Nor do the
    process groups of a peer in rank 0: the other ranks do not have them."""
    monkeypatch.setattr(rendezvous, "_store_of_trainer", HashStore)
    world = replace(_rank(0), launcher=OWN, job=f"test-{os.getpid()}")
    environ = {"IOBENCH_STORE": "tcp://192.0.2.1:9", "GLOO_SOCKET_IFNAME": "nothing"}
    meeting = meet(world, deadline_s=1, environ=environ)
    assert meeting.server is not None
    with meeting.server:
        assert meeting.address[0].startswith("127.")
    meeting.withdraw()
