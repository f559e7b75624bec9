"""What clients may ask of /v1/completions."""

from __future__ import annotations

import json
import secrets
from typing import Annotated, cast

import msgspec

from crossrail.kv import messages as m
from crossrail.kv.http.errors import FieldError

StopText = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
ModelName = Annotated[str, msgspec.Meta(max_length=1024)]
PromptText = Annotated[str, msgspec.Meta(max_length=4 << 20)]
Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
PromptTokens = Annotated[list[Token], msgspec.Meta(max_length=m.TOKENS_MAX)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """include_usage: usage comes in an event of its own after the others, which have null there, as in OpenAI's API.
    Without it, the last event with a choice carries the usage. include_obfuscation: OpenAI's padding against
    eavesdroppers, which is not implemented: only false is accepted.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class CompletionBody(msgspec.Struct, forbid_unknown_fields=True):
    """What a client may ask for. OpenAI's other fields are refused, not ignored; null means not given.

    The fields from n on are accepted if they ask for what is done anyway: clients send them with their defaults.
    """

    # A prompt, or a list with one prompt.
    prompt: PromptText | Annotated[list[Token | PromptText | PromptTokens], msgspec.Meta(max_length=m.TOKENS_MAX)]
    model: ModelName | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=m.TOKENS_MAX)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: StopText | Annotated[list[StopText], msgspec.Meta(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: int | None = None
    suffix: str | None = None
    logit_bias: dict[str, float] | None = None
    repetition_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None

    @classmethod
    def from_json(cls, data: bytes | bytearray) -> CompletionBody:
        """FieldError for what is no such JSON."""
        try:
            return _decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise FieldError.of_json(error) from None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def one_prompt(self) -> str | list[int]:
        """The only prompt. FieldError for several."""
        if isinstance(self.prompt, str):
            return self.prompt
        if set(map(type, self.prompt)) <= {int}:
            return cast(list[int], self.prompt)
        if len(self.prompt) > 1:
            count = len(self.prompt)
            words = f"`prompt` has {count} entries, not all of them token ids: a list of prompts may have one"
            raise FieldError(words, "prompt")
        return cast("str | list[int]", self.prompt[0])

    def sampling(self) -> m.Sampling:
        """The sampling options, with OpenAI's defaults. FieldError for unsupported values."""
        for name, done in _DONE_ANYWAY.items():
            if (value := getattr(self, name)) is not None and value not in done:
                only = f", only {' or '.join(map(json.dumps, done))}" if done else ""
                raise FieldError(f"`{name}` = {m.clipped(json.dumps(value))} is not supported{only}", name)
        if self.stream_options is not None and not self.stream:
            raise FieldError("`stream_options` is given, and `stream` is not true", "stream_options")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            raise FieldError("`include_obfuscation` = true is not supported, only false", "stream_options")
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        # Drawn here, not at a decoder: a decoder that takes over from a dead one has to draw the same tokens.
        given.setdefault("seed", secrets.randbits(63))
        given["seed"] %= 1 << 63  # negative seeds are as good as others
        if given.get("top_p") == 0.0:  # keep only the likeliest token
            given |= {"top_p": 1.0, "temperature": 0.0}
        return m.Sampling(**{**_DEFAULTS, **given}, ignore_end=bool(self.ignore_eos))


_SAMPLING = ("max_tokens", "temperature", "top_p", "seed")
_DEFAULTS = {"max_tokens": 16, "temperature": 1.0}
_DONE_ANYWAY: dict[str, tuple[object, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "presence_penalty": (0,), "frequency_penalty": (0,), "logprobs": (),
    "suffix": ("",), "logit_bias": ({},), "repetition_penalty": (1,), "top_k": (0, -1), "min_p": (0,),
}  # fmt: skip


_decoder = msgspec.json.Decoder(CompletionBody)
