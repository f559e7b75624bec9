"""What instances of vLLM say about themselves, and what clients may put into a request."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import crossrail as xr
from crossrail.integrations.instance import Instance, Worker, fingerprint, mismatch, parse_rank_name, rank_name
from crossrail.integrations.vllm.handoff import Parameters, reply, transfer_id_of
from crossrail.integrations.vllm.options import VllmOptions
from crossrail.kv import KvLayout

SECRET = b"secret"
LAYOUT = KvLayout(layers=2, pages=8, page_tokens=32, kv_heads=4, head_dim=64, dtype="float32", kind="PACKED", tp=2)
FORM = {"attention": "CPU_ATTN", "packing": "vec"}


def worker(address: bytes = b"a", layout: KvLayout = LAYOUT, **form: str) -> Worker:
    return Worker(address, layout.to_wire(), FORM | form)


INSTANCE = Instance("p", [worker(b"a"), worker(b"b")])


def test_an_instance_comes_back_from_its_line() -> None:
    line = INSTANCE.to_line(SECRET)

    found = Instance.from_line(line, SECRET)

    assert found == INSTANCE
    assert found.layout == LAYOUT and found.form == FORM
    assert line.isascii() and "\n" not in line


def test_restarted_instance_is_another_writer() -> None:
    assert INSTANCE.writer != Instance("p", [worker(b"a"), worker(b"c")]).writer


def test_only_who_knows_the_secret_can_describe_an_instance() -> None:
    with pytest.raises(xr.UsageError, match="not sealed with our secret"):
        Instance.from_line(INSTANCE.to_line(b"another"), SECRET)


@given(st.integers(0, 2**32))
def test_a_changed_line_is_refused(at: int) -> None:
    line = list(INSTANCE.to_line(SECRET))
    at %= len(line)
    line[at] = "A" if line[at] != "A" else "B"

    try:
        found = Instance.from_line("".join(line), SECRET)
    except xr.UsageError:
        return
    assert found == INSTANCE  # the last character has bits that say nothing


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda data: data.decode("latin-1")))
def test_what_is_no_line_is_refused(text: str) -> None:
    with pytest.raises(xr.UsageError):
        Instance.from_line(text, SECRET)


@pytest.mark.parametrize(
    ("instance", "message"),
    [
        (Instance("p", INSTANCE.workers, version=2), "speaks version 2, this one 1"),
        (Instance("p", [worker()]), "1 workers are described, the layout has TP 2"),
        (Instance("p", [worker(), worker(layout=replace(LAYOUT, pages=9))]), "different layouts"),
        (Instance("p", [Worker(b"a", {"pages": 1}, {})]), "a layout has the fields"),
        (Instance("", INSTANCE.workers), "malformed description"),
    ],
)
def test_sealed_nonsense_is_refused(instance: Instance, message: str) -> None:
    with pytest.raises(xr.UsageError, match=message):
        Instance.from_line(instance.to_line(SECRET), SECRET)


# --- parameters ---


def test_what_a_producer_answers_is_what_a_consumer_takes() -> None:
    line = INSTANCE.to_line(SECRET)

    parameters = Parameters.of(reply("t", line, "engine", "request", 150, 2))

    assert parameters == Parameters(
        do_remote_prefill=True, transfer_id="t", crossrail_instance=line, remote_num_tokens=150
    )


@pytest.mark.parametrize("given_", [None, {}, {"do_remote_decode": False, "remote_block_ids": [1], "x": object()}])
def test_other_keys_are_others_business(given_: dict[str, Any] | None) -> None:
    assert Parameters.of(given_) == Parameters()


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"do_remote_prefill": "yes"}, "do_remote_prefill"),
        ({"do_remote_prefill": True}, "needs transfer_id and crossrail_instance"),
        ({"do_remote_prefill": True, "do_remote_decode": True}, "exclude each other"),
        ({"do_remote_decode": True, "transfer_id": ""}, "transfer_id"),
        ({"do_remote_decode": True, "transfer_id": "x" * 97}, "transfer_id"),
        ({"transfer_id": 5}, "transfer_id"),
        ({"remote_num_tokens": 0}, "remote_num_tokens"),
        ({"crossrail_instance": "x" * (2 << 20)}, "crossrail_instance"),
    ],
)
def test_malformed_parameters_are_named(given_: dict[str, Any], message: str) -> None:
    with pytest.raises(xr.UsageError, match=message):
        Parameters.of(given_)


# --- what must agree ---


def test_what_may_differ() -> None:
    theirs = worker(layout=replace(LAYOUT, pages=100, tp=1))

    assert mismatch(theirs, worker()) == ""
    assert fingerprint(worker()) == fingerprint(worker(b"elsewhere")) != fingerprint(theirs)


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (worker(layout=replace(LAYOUT, page_tokens=64)), "page_tokens: producer 64, decoder 32"),
        (worker(packing="amx"), "packing: producer amx, decoder vec"),
        (worker(model="5"), "model: producer 5, decoder (not said)"),
    ],
)
def test_what_must_not_differ_is_named_and_both_are_shown(theirs: Worker, message: str) -> None:
    words = mismatch(theirs, worker())

    assert message in words
    assert KvLayout.from_wire(theirs.layout).describe() in words and LAYOUT.describe() in words


# --- names ---


@given(st.text(min_size=1, max_size=40), st.integers(0, 7))
def test_names_of_parts_come_back(transfer_id: str, rank: int) -> None:
    assert parse_rank_name(rank_name(transfer_id, rank, 8)) == (transfer_id, rank, 8)


@pytest.mark.parametrize(
    "name", ["", "t", "t@", "t@1", "t@1/1", "@0/1", "t@-1/2", "t@0/9999", "t@0/²", "t@0/0", "t@a/b"]
)
def test_what_names_no_part_is_refused(name: str) -> None:
    with pytest.raises(xr.UsageError):
        parse_rank_name(name)


def test_long_request_ids_make_short_transfer_ids() -> None:
    ids = {transfer_id_of("x" * n) for n in range(90, 110)}

    assert len(ids) == 20 and max(map(len, ids)) <= 96


# --- options ---


def test_every_option_has_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSRAIL_SECRET", "from the environment")

    assert VllmOptions.of({}) == VllmOptions()
    assert VllmOptions().secret() == b"from the environment"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"lease": 3}, "has no option lease: it has .*lease_s, heartbeat_s"),
        ({"lease_s": 0}, "lease_s"),
        ({"lease_s": "3"}, "lease_s"),
        ({"rails": 17}, "rails"),
        ({"lease_s": 10.0}, "heartbeat_s=5 must be at most a third of lease_s=10"),
    ],
)
def test_bad_options_are_named(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(xr.UsageError, match=message):
        VllmOptions.of(extra)


def test_an_instance_is_written_for_routers(tmp_path: Path) -> None:
    VllmOptions().write_instance("nowhere")
    options = VllmOptions(instance_file=str(tmp_path / "p.instance"))
    for line in ("before", "after a restart"):
        options.write_instance(line)
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("p.instance", line + "\n")]
    with pytest.raises(xr.UsageError, match=r"instance_file .*/nowhere/p\.instance: .*No such file"):
        VllmOptions(instance_file=str(tmp_path / "nowhere" / "p.instance")).write_instance(line)


def test_replicas_share_neither_ports_nor_files() -> None:
    given_ = VllmOptions(port=7000, rails=2, instance_file="/run/p.instance")
    assert given_.of_replica(0, 0) == given_
    second = given_.of_replica(1, 4)
    assert (second.port, second.instance_file) == (7008, "/run/p.instance.dp1")
    assert VllmOptions().of_replica(3, 12) == VllmOptions()


def test_no_secret_no_connector(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CROSSRAIL_SECRET", raising=False)
    with pytest.raises(xr.UsageError, match="needs a secret"):
        VllmOptions().secret()
    with pytest.raises(xr.UsageError, match="secret_file: "):
        VllmOptions(secret_file=str(tmp_path / "none")).secret()
    (tmp_path / "secret").write_text(" 5 \n")
    assert VllmOptions(secret_file=str(tmp_path / "secret")).secret() == b"5"


def test_the_package_does_not_need_vllm() -> None:
    import crossrail.integrations.vllm as package

    with pytest.raises(AttributeError, match="no attribute 'Connector'"):
        package.Connector  # noqa: B018
