"""KV of another prompt, or by another LoRA adapter, is refused before anything is written."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from crossrail.integrations.sglang import prompts
from crossrail.integrations.sglang.prompts import Adapters, Prompt, prompt_of
from tests.sglang.side import FAILED, MINE, WAITING, Side, ask, failure, finish, until

OURS = Prompt(b"tokens", "legal", b"weights")


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (Prompt(b"others", "legal", b"weights"), "the decoder's prompt has other tokens than the one prefilled here"),
        (
            Prompt(b"tokens", "legal", b"others"),
            "the LoRA adapter 'legal' has other weights at the decoder than here: load the same one again",
        ),
        (
            Prompt(b"tokens", "medical", b"weights"),
            "the decoder's request has LoRA adapter 'medical', the one prefilled here LoRA adapter 'legal'",
        ),
        (Prompt(b"tokens"), "the decoder's request has no LoRA adapter, the one prefilled here LoRA adapter 'legal'"),
    ],
)
def test_a_prompt_that_is_another_is_never_written(p: Side, d: Side, theirs: Prompt, words: str) -> None:
    sender, receiver = p.sender(1), d.receiver(1, prompt=theirs)
    sender.prompt = OURS
    ask(receiver)
    until(WAITING, sender)
    sender.init(len(MINE), 0)
    until(FAILED, sender, receiver)
    assert failure(sender).failure_reason == words
    assert words in failure(receiver).failure_reason
    d.assert_untouched([], [])


@pytest.mark.parametrize("theirs", [OURS, Prompt(b"", "legal", b"weights"), Prompt(b"tokens", "legal"), None])
def test_a_prompt_is_compared_in_what_both_sides_know(p: Side, d: Side, theirs: Prompt | None) -> None:
    sender, receiver = p.sender(1), d.receiver(1, prompt=theirs)
    sender.prompt = OURS
    ask(receiver)
    finish(p, d, sender, receiver, "the same")


def request(**more: Any) -> Any:
    """SGLang's Req."""
    fields: dict[str, Any] = {
        "origin_input_ids": [1, 2, 3],
        "output_ids": [],
        "lora_id": None,
        "multimodal_inputs": None,
    }
    return SimpleNamespace(**fields | more)


def test_a_retracted_request_is_the_prompt_that_is_computed_again() -> None:
    again = prompt_of(request(origin_input_ids=[1], output_ids=[2, 3]), None, Adapters())
    assert again == prompt_of(request(), None, Adapters()) != prompt_of(request(output_ids=[4]), None, Adapters())


def test_tokens_of_media_are_not_compared() -> None:
    """SGLang puts hashes there, of what a server's processor has made of them."""
    assert prompt_of(request(multimodal_inputs=object()), None, Adapters()) == Prompt()


def test_nothing_is_known_of_an_adapter_that_is_not_loaded() -> None:
    assert prompt_of(request(lora_id="1f"), SimpleNamespace(lora_refs={}), Adapters()) is None


def test_an_adapter_is_known_by_its_name_and_its_weights_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []

    def digest_of(adapter: Any) -> bytes:
        read.append(adapter)
        return b"of its weights"

    monkeypatch.setattr(prompts, "_digest_of", digest_of)
    manager = SimpleNamespace(lora_refs={"1f": SimpleNamespace(lora_name="legal")}, loras={"1f": "its weights"})
    adapters = Adapters()
    for _ in range(2):
        told = prompt_of(request(lora_id="1f"), manager, adapters)
        assert told is not None and (told.adapter, told.weights) == ("legal", b"of its weights")
    assert read == ["its weights"]


@pytest.mark.parametrize("mode", prompts.QUEUES)
def test_senders_and_receivers_are_told_by_sglangs_queues(mode: str) -> None:
    conn = importlib.import_module("crossrail.integrations.sglang.conn")
    kind = conn.CrossrailKVSender if mode == "prefill" else conn.CrossrailKVReceiver
    one = object.__new__(kind)
    one.kv_mgr = SimpleNamespace(adapters=Adapters())
    asked = request()
    queue = SimpleNamespace(scheduler=SimpleNamespace(tp_worker=SimpleNamespace(model_runner=SimpleNamespace())))

    def create_sender(_queue: Any, req: Any, _heads: int) -> bool:
        req.disagg_kv_sender = one
        return True

    if mode == "prefill":
        assert prompts.told_sender(create_sender, queue, asked, 2) is True
    else:
        prompts.told_receiver(lambda *_, **__: SimpleNamespace(kv_receiver=one), queue, asked, is_rebootstrap=False)
    assert one.prompt == prompt_of(request(), None, Adapters())


def test_a_backend_of_sglangs_own_is_told_nothing() -> None:
    """Its health checks use one that moves nothing."""
    prompts.told_receiver(lambda *_: SimpleNamespace(kv_receiver=object()), object(), request())
    assert prompts.told_sender(lambda *_: False, object(), request(), 2) is False
