"""What `serve` and `push` take from each other and from the file system: nothing outside its bounds."""

import asyncio
import errno
import hashlib
import io
import json
import mmap
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.progress import Progress

import crossrail as xr
from crossrail.cli import rendezvous, source
from crossrail.cli.demo.plan import shuffled_pages, split_file, tail_places
from crossrail.cli.files import pusher as pusher_module
from crossrail.cli.files import wire
from crossrail.cli.files.inbox import FileRefused, Inbox, PartFile
from crossrail.cli.files.push import destination
from crossrail.cli.files.pusher import Pusher
from crossrail.cli.files.server import Limits, Server
from crossrail.cli.main import main
from crossrail.cli.source import SourceFile
from crossrail.errors import CrossrailError, UsageError
from tests.conftest import EngineFactory
from tests.support.limits import PROGRAM_S, WAIT_S, eventually

LATER_OFFER = b'{"kind": "offer", "push": 5, "version": 2, "release": "9.8.7", "what": {"a later version": "has"}}'

MESSAGES = [
    wire.Offer(1, "a/b", 5, 0o644, False),
    wire.Accept(1, "ab", 64, 128, [1, 2]),
    wire.Refuse(2, "no"),
    wire.Stored(1, 2),
    wire.End(1, "aa"),
    wire.Done(1, "p", "s"),
    wire.Failed(1, "r"),
    wire.Abort(3),
]

# --- messages ---


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_survives_its_bytes(message: wire.Message) -> None:
    assert wire.decode(wire.encode(message)) == message


def test_reason_is_cut_and_made_unicode() -> None:
    message = wire.decode(wire.encode(wire.Refuse(1, "\udcff" + "x" * 9000)))

    assert isinstance(message, wire.Refuse)
    assert message.reason == "?" + "x" * 1023


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 5000,
        b"9" * 5000,
        b"{}" + b" " * wire.MESSAGE_BYTES_MAX,
        b'{"kind": 1}',
        b'{"kind": "fly", "push": 1}',
        b'{"kind": "stored", "push": 1}',
        b'{"kind": "stored", "push": 1, "segment": 1, "more": 2}',
        b'{"kind": "stored", "push": true, "segment": 1}',
        b'{"kind": "stored", "push": 1.0, "segment": 1}',
        b'{"kind": "stored", "push": -1, "segment": 1}',
        b'{"kind": "stored", "push": 1, "segment": NaN}',
        b'{"kind": "end", "push": 1, "sha256": "\\ud800"}',
        b'{"kind": "accept", "push": 1, "region": "", "page_bytes": 3, "slot_bytes": 8, "imms": []}',
        b'{"kind": "accept", "push": 1, "region": "", "page_bytes": 4, "slot_bytes": 8, "imms": [268435456]}',
        b'{"kind": "accept", "push": 1, "region": "", "page_bytes": 4, "slot_bytes": 8, "imms": ["1"]}',
        b'{"kind": "accept", "push": 1, "region": "0g", "page_bytes": 4, "slot_bytes": 8, "imms": []}',
        b'{"kind": "accept", "push": 1, "region": "abc", "page_bytes": 4, "slot_bytes": 8, "imms": []}',
        b'{"kind": "offer", "push": 1, "dst": "x", "nbytes": -1, "mode": 0, "force": false}',
        b'{"kind": "offer", "push": 1, "dst": "x", "nbytes": 1, "mode": 0, "force": 1}',
    ],
)
def test_malformed_message_refused(data: bytes) -> None:
    with pytest.raises(wire.ProtocolError) as refused:
        wire.decode(data.replace(b'"push"', b'"version": 1, "push"'))
    assert not isinstance(refused.value, wire.OtherVersion) or b"push" not in data


@given(st.binary(max_size=200) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_any_bytes_decode_or_are_refused(data: bytes | str) -> None:
    try:
        message = wire.decode(data if isinstance(data, bytes) else data.encode())
    except wire.ProtocolError:
        return
    assert isinstance(message, wire.Message)


@given(st.integers(0, 10**9), st.integers(1, 4096), st.integers(1, 64))
def test_layout_covers_the_file_exactly(nbytes: int, pages_per_slot: int, page_bytes: int) -> None:
    layout = wire.Layout(nbytes, pages_per_slot * page_bytes, page_bytes)

    last = layout.segments - 1
    if nbytes > 0:
        assert last * layout.slot_bytes + layout.segment_bytes(last) == nbytes
        assert 1 <= layout.segment_bytes(last) <= layout.slot_bytes
        assert (layout.segment_pages(last) - 1) * page_bytes < layout.segment_bytes(last)
    else:
        assert layout.segments == 0


# --- the directory ---


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "root"
    (directory / "sub").mkdir(parents=True)
    (directory / "out").symlink_to(tmp_path)
    (directory / "link").symlink_to(tmp_path / "elsewhere")
    (directory / "have").write_text("kept")
    return directory


@pytest.mark.parametrize(
    "dst",
    [
        *("/x", "../x", "sub/../../x", "sub//x", "", ".", "sub/", "missing/x", "out/x", "have", "link", "sub"),
        *("a\nb", "x" * 256, "y/" * 40 + "z", "q.crossrail-part"),
    ],
)
def test_destination_outside_or_taken_refused(root: Path, dst: str) -> None:
    before = sorted(root.parent.rglob("*"))

    with Inbox(root) as inbox, pytest.raises(FileRefused):
        inbox.create(dst, 1, force=False)

    assert sorted(root.parent.rglob("*")) == before
    assert (root / "have").read_text() == "kept"


def test_file_has_its_name_only_when_whole(root: Path) -> None:
    with Inbox(root) as inbox:
        part = inbox.create("sub/new", 5, force=False)
        part.append(memoryview(b"hello"))
        assert not (root / "sub/new").exists()

        part.commit(0o4755)

    assert (root / "sub/new").read_text() == "hello"
    assert os.listdir(root / "sub") == ["new"]
    assert (root / "sub/new").stat().st_mode & 0o7000 == 0


def test_discarded_file_leaves_nothing(root: Path) -> None:
    with Inbox(root) as inbox:
        part = inbox.create("sub/new", 5, force=False)
        part.append(memoryview(b"he"))

        part.discard()
        part.discard()

    assert os.listdir(root / "sub") == []


def test_forced_file_replaces_a_link_and_not_what_it_leads_to(root: Path) -> None:
    (root.parent / "elsewhere").write_text("kept")
    with Inbox(root) as inbox:
        part = inbox.create("link", 3, force=True)
        part.append(memoryview(b"new"))

        part.commit(0o644)

    assert (root / "link").read_text() == "new"
    assert not (root / "link").is_symlink()
    assert (root.parent / "elsewhere").read_text() == "kept"


def test_forced_file_that_is_interrupted_leaves_nothing_hidden(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def link_and_fail(*args: Any, **options: Any) -> None:
        link(*args, **options)
        raise InterruptedError

    with Inbox(root) as inbox:
        part = inbox.create("sub/new", 3, force=True)
        monkeypatch.setattr(os, "link", link_and_fail)
        with pytest.raises(FileRefused):
            part.commit(0o644)

    assert os.listdir(root / "sub") == []


def test_name_taken_in_the_meantime_is_kept(root: Path) -> None:
    with Inbox(root) as inbox:
        part = inbox.create("late", 3, force=False)
        (root / "late").write_text("first")

        with pytest.raises(FileRefused, match="'late' exists at the target; push with --force"):
            part.commit(0o644)

    assert (root / "late").read_text() == "first"


def test_file_whose_bytes_are_refused_at_its_close_gets_no_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS may take all writes, and say only then that there was no room for them."""
    close = os.close

    def fail(fd: int) -> None:
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        close(fd)
        if is_file:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with Inbox(root) as inbox:
        before = len(os.listdir("/proc/self/fd"))
        part = inbox.create("sub/new", 3, force=False)
        part.append(memoryview(b"abc"))
        with monkeypatch.context() as full:
            full.setattr(os, "close", fail)
            with pytest.raises(FileRefused, match="Disk quota exceeded"):
                part.commit(0o644)
        assert len(os.listdir("/proc/self/fd")) == before
    assert list((root / "sub").iterdir()) == []


def test_directory_that_was_deleted_is_told_as_such(root: Path) -> None:
    with Inbox(root) as inbox:
        shutil.rmtree(root)
        with pytest.raises(FileRefused, match="the served directory was deleted at the target"):
            inbox.create("new", 5, force=False)


def test_file_larger_than_the_disk_refused(root: Path) -> None:
    with (
        Inbox(root) as inbox,
        pytest.raises(FileRefused, match=rf"do not fit: \d+ are free at the target, which keeps {16 << 20} free"),
    ):
        inbox.create("big", 1 << 49, force=False)


@pytest.mark.parametrize("call", ["fstatvfs", "dup", "stat"])
def test_file_system_that_fails_refuses_and_leaves_no_descriptor(
    root: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Inbox(root) as inbox:
        before = len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as broken:
            broken.setattr(os, call, fail)
            with pytest.raises(FileRefused, match="'sub/new': cannot be stored at the target: Input/output error"):
                inbox.create("sub/new", 1, force=False)
        assert len(os.listdir("/proc/self/fd")) == before


# --- a serve that ends ---


async def test_serve_that_ends_waits_for_the_disk(
    root: Path, open_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a thread still writes to is not closed under it, however often the serve is told to end."""
    begun, go_on = threading.Event(), threading.Event()
    rename = PartFile._rename

    def slow_rename(part: PartFile) -> None:
        begun.set()
        go_on.wait(WAIT_S)
        rename(part)

    monkeypatch.setattr(PartFile, "_rename", slow_rename)
    ours, theirs = open_engine(), open_engine()
    with Inbox(root) as inbox, ours.submit_recvs(4, wire.MESSAGE_BYTES_MAX) as pool:
        server = Server(theirs, inbox, Progress(disable=True), Limits(1, WAIT_S))
        serving = asyncio.create_task(server.run(once=False))
        for message in (wire.Offer(1, "sub/new", 0, 0o644, True), wire.End(1, hashlib.sha256().hexdigest())):
            await ours.submit_send(theirs.address, wire.encode(message))
        assert await asyncio.to_thread(begun.wait, WAIT_S)

        for _ in range(2):
            serving.cancel()
            await asyncio.sleep(0.05)
        assert not serving.done()
        go_on.set()
        await asyncio.wait([serving], timeout=WAIT_S)

        told = [wire.decode((await pool.recv_async(WAIT_S)).data) for _ in range(2)]

    assert serving.cancelled()
    assert os.listdir(root / "sub") == ["new"]
    assert isinstance(told[-1], wire.Done)  # Ctrl-C, and the pusher knows that it is stored


async def test_pushes_that_are_given_up_leave_no_immediate_taken(root: Path, open_engine: EngineFactory) -> None:
    """A serve lives for months, and pushers break off every day."""
    ours, theirs = open_engine(), open_engine(imm_counters_max=16)
    screen = io.StringIO()
    with Inbox(root) as inbox, ours.submit_recvs(16, wire.MESSAGE_BYTES_MAX):
        progress = Progress(console=Console(file=screen, width=1000), disable=True)
        serving = asyncio.create_task(Server(theirs, inbox, progress, Limits(2, 0.1)).run(once=False))
        for push in range(5):  # four immediates each; the one before may still be telling its pusher
            offer = wire.Offer(push, f"file{push}", 32 << 20, 0o644, False)
            await ours.submit_send(theirs.address, wire.encode(offer))
            await asyncio.to_thread(eventually, lambda n=push: f"file{n}: " in screen.getvalue(), "it is given up")
        serving.cancel()
        await asyncio.wait([serving], timeout=WAIT_S)

    assert screen.getvalue().count("nothing arrived for 0.1 s") == 5


async def test_pusher_that_takes_no_message_is_dropped_when_it_was_idle_for_too_long_and_reads_why(
    root: Path, open_engine: EngineFactory
) -> None:
    ours, theirs = open_engine("pusher", polling="manual"), open_engine()  # stopped: nobody drives it
    screen = io.StringIO()
    with Inbox(root) as inbox, ours.submit_recvs(16, wire.MESSAGE_BYTES_MAX) as pool:
        progress = Progress(console=Console(file=screen, width=1000), disable=True)
        serving = asyncio.create_task(Server(theirs, inbox, progress, Limits(1, 0.5)).run(once=False))
        offer = wire.Offer(7, "file", 100, 0o644, False)
        await asyncio.to_thread(ours.submit_send(theirs.address, wire.encode(offer)).wait, WAIT_S)

        await asyncio.to_thread(eventually, lambda: "dropped" in screen.getvalue(), "it is dropped", 5)
        told = [wire.decode(pool.recv(WAIT_S).data)]
        while not isinstance(told[-1], wire.Failed):  # a stopped pusher has not read the first message either
            told.append(wire.decode(pool.recv(WAIT_S).data))
        serving.cancel()
        await asyncio.wait([serving], timeout=WAIT_S)

    assert told[-1] == wire.Failed(7, "pusher took no message for 0.5 s (was it stopped?); nothing was stored")


async def test_message_that_is_none_does_not_steer_the_terminal(root: Path, open_engine: EngineFactory) -> None:
    ours, theirs = open_engine(), open_engine()
    screen = io.StringIO()
    with Inbox(root) as inbox:
        progress = Progress(console=Console(file=screen), disable=True)
        serving = asyncio.create_task(Server(theirs, inbox, progress, Limits(1, WAIT_S)).run(once=False))
        await ours.submit_send(theirs.address, b'{"kind": "\\u001b[2J", "push": 1, "version": 1}')
        await asyncio.to_thread(eventually, screen.getvalue, "it is told")
        serving.cancel()
        await asyncio.wait([serving], timeout=WAIT_S)

    assert "ignored a message from" in screen.getvalue()
    assert "Invalid value '?[2J'" in screen.getvalue()


async def test_push_of_another_version_is_refused_and_both_are_named(root: Path, open_engine: EngineFactory) -> None:
    ours, theirs = open_engine("pusher"), open_engine()
    screen = io.StringIO()
    with Inbox(root) as inbox, ours.submit_recvs(4, wire.MESSAGE_BYTES_MAX) as pool:
        progress = Progress(console=Console(file=screen, width=1000), disable=True)
        serving = asyncio.create_task(Server(theirs, inbox, progress, Limits(1, WAIT_S)).run(once=False))
        await ours.submit_send(theirs.address, LATER_OFFER)
        told = json.loads((await pool.recv_async(WAIT_S)).data)
        await asyncio.to_thread(eventually, screen.getvalue, "it is told")
        serving.cancel()
        await asyncio.wait([serving], timeout=WAIT_S)

    assert "is crossrail 9.8.7, which speaks version 2 of pushes, and this one crossrail " in screen.getvalue()
    assert (told["kind"], told["push"], told["version"], told["release"]) == ("refuse", 5, 1, xr.__version__)


# --- what a pusher is told ---


def test_destination_keeps_the_name_as_cp_does() -> None:
    assert destination("", Path("a/b")) == "b"
    assert destination("sub/", Path("a/b")) == "sub/b"
    assert destination("c", Path("a/b")) == "c"


@pytest.mark.parametrize("name", [os.fsdecode(b"raw\xff.bin"), "\N{GRINNING FACE}" * 257], ids=["no UTF-8", "long"])
def test_name_that_no_serve_can_be_told_refused(name: str) -> None:
    """The serve cannot even answer to such an offer: it does not know to whom."""
    with pytest.raises(UsageError, match="DST"):
        destination("", Path(name))


# A push, its engine, and that of a serve.
Pushing = tuple[Pusher, xr.Engine, xr.Engine]


@pytest.fixture
def pusher(open_engine: EngineFactory, tmp_path: Path) -> Iterator[Pushing]:
    """A push in the middle, its engine, and that of a serve that says nothing."""
    (tmp_path / "file").write_bytes(bytes(100))
    ours, theirs = open_engine(), open_engine()
    with SourceFile(tmp_path / "file") as source, ours.submit_recvs(4, wire.MESSAGE_BYTES_MAX) as pool:
        ours.connect(theirs.address)
        yield Pusher(ours, pool, theirs.address, source), ours, theirs


def test_serve_that_is_gone_is_told_with_the_reason(pusher: Pushing) -> None:
    """Not every serve that is lost has ended: over a network it may be cut off."""
    push, _, theirs = pusher
    theirs.close()
    with pytest.raises(xr.CrossrailError, match=r"not stored: the engine was closed"):
        push._next_message()


def test_serve_of_another_version_is_told_as_such(pusher: Pushing) -> None:
    push, engine, serve = pusher
    answer = json.dumps({"kind": "refuse", "push": 1, "version": 2, "release": "9.8.7", "later": []})
    serve.submit_send(engine.address, answer.encode()).wait(WAIT_S)
    with pytest.raises(wire.OtherVersion, match=f"is crossrail 9.8.7, .* this one crossrail {xr.__version__}, "):
        push._next_message()


def test_serve_that_gave_up_is_told_as_such(pusher: Pushing) -> None:
    push, ours, theirs = pusher
    region = theirs.alloc(100)
    target = region.descriptor
    region.close()
    push._transfers = [ours.submit_write(ours.alloc(100), target)]
    with pytest.raises(xr.CrossrailError, match="the server gave up this push"):
        push._next_message()


def test_serve_that_is_silent_is_told_as_such(pusher: Pushing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pusher_module, "_ANSWER_TIMEOUT_S", 0.1)
    with pytest.raises(xr.CrossrailError, match=r"did not answer for 0\.1 s.*is stopped"):
        pusher[0]._next_message()


def test_of_a_serve_that_fell_silent_after_all_was_sent_nothing_is_claimed(
    pusher: Pushing, monkeypatch: pytest.MonkeyPatch
) -> None:
    push, _, theirs = pusher
    push._has_ended = True
    monkeypatch.setattr(pusher_module, "_ANSWER_TIMEOUT_S", 0.1)
    with pytest.raises(xr.CrossrailError, match=r"it is unknown whether the file was stored.*SHA-256, e3b0c44"):
        push._next_message()
    monkeypatch.undo()
    theirs.close()
    with pytest.raises(xr.CrossrailError, match="gone, so it is unknown whether the file was stored"):
        push._next_message()


# --- names ---


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "crossrail"


def test_published_name_resolves_until_it_is_closed(names: Path, engine: xr.Engine) -> None:
    with rendezvous.publish(None, engine.address) as published:
        assert rendezvous.resolve(f"{published.name}:a/b:c") == (engine.address, "a/b:c")
        assert rendezvous.resolve(f"{published.path}:d") == (engine.address, "d")

    with pytest.raises(CrossrailError, match="none is running"):
        rendezvous.resolve(published.name)


def test_second_serve_gets_another_name_or_a_refusal(names: Path, engine: xr.Engine) -> None:
    with rendezvous.publish(None, engine.address), rendezvous.publish(None, engine.address) as second:
        assert second.name == "inbox-2"
        with pytest.raises(UsageError, match="inbox"):
            rendezvous.publish("inbox", engine.address)


def test_name_of_a_dead_serve_is_taken_over(names: Path, engine: xr.Engine) -> None:
    script = (
        "import os, crossrail as xr; from crossrail.cli import rendezvous\n"
        "rendezvous.publish('dead', xr.Engine('dead').address); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PROGRAM_S)
    assert os.listdir(names) == ["dead.serve"]

    with pytest.raises(CrossrailError, match="dead"):
        rendezvous.resolve("dead:")

    assert os.listdir(names) == []


def test_file_that_is_no_address_is_refused_and_kept(names: Path, tmp_path: Path) -> None:
    file = tmp_path / "precious"
    file.write_text("mine")

    with pytest.raises(CrossrailError):
        rendezvous.resolve(f"{file}:x")

    assert file.read_text() == "mine"


def test_address_file_of_another_version_is_refused_and_both_are_named(names: Path, engine: xr.Engine) -> None:
    with rendezvous.publish(None, engine.address) as published:
        content = json.loads(published.path.read_text())
        assert content["crossrail"] == xr.__version__
        published.path.write_text(json.dumps({"format": 2, "crossrail": "9.8.7", "elsewhere": 0}))
        with pytest.raises(
            UsageError, match=r"by crossrail 9\.8\.7 \(format 2\), and this is crossrail .*\(format 1\)"
        ):
            rendezvous.resolve(published.name)


@pytest.mark.parametrize("name", ["", "..", "a/b", "a b", "-x", "x" * 65])
def test_name_out_of_bounds_refused(names: Path, open_engine: EngineFactory, name: str) -> None:
    with pytest.raises(UsageError):
        rendezvous.publish(name, open_engine().address)


def test_runtime_directory_open_to_others_refused(names: Path) -> None:
    names.mkdir()
    names.chmod(0o755)

    with pytest.raises(xr.CrossrailError, match="0700"):
        rendezvous.runtime_dir()


def test_explain_shows_a_name_that_would_steer_the_terminal(names: Path, open_engine: EngineFactory) -> None:
    odd = open_engine("odd\x1b]0;x\x07", transport="shm")

    with rendezvous.publish("odd", odd.address):
        said = CliRunner().invoke(main, ["explain", "odd"])

    assert said.exit_code == 0, said.output
    assert said.stdout.startswith("peer 'odd?]0;x?' over shm: connected\n")


# --- the demo's pages ---


def test_demo_finds_its_file_where_files_of_any_name_are_mapped(tmp_path: Path) -> None:
    library = tmp_path / os.fsdecode(b"libpython\xff.so")
    library.write_bytes(bytes(4096))

    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        found = source._mapped_library()

    assert found is not None and found.name.startswith("libpython")


@given(st.integers(1, 1 << 20), st.integers(1, 5000), st.integers(1, 1 << 20), st.integers(0, 100))
def test_every_page_of_every_copy_has_a_place_of_its_own(nbytes: int, page_bytes: int, pool: int, seed: int) -> None:
    segments = list(split_file(nbytes, pool, page_bytes, seed))

    assert [s.offset for s in segments] == [i * segments[0].nbytes for i in range(len(segments))]
    assert sum(segment.nbytes for segment in segments) == nbytes
    for segment in segments[:1] + segments[-1:]:
        _, places = shuffled_pages(segment)
        used = sorted([*places.tolist(), *tail_places(segment).tolist()])
        assert used == list(range(segment.total_pages))
