"""From a framework's tensors to the checkpoint's parameters: rules that say which parameters are where in which tensor.

A rule names a framework's tensor and the parameters that it concatenates. What a rank of tensor or expert parallelism
holds, and the scales of fp8 blocks, follow from it. To add a model or a framework, add a tuple of rules; families.py
has examples.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from crossrail.errors import UsageError
from crossrail.weights.dtypes import ITEM_BYTES, dtype_code
from crossrail.weights.inventory.holdings import Box, Holding, c_strides
from crossrail.weights.inventory.wrappers import meant, unwrapped

__all__ = ["Names", "Part", "Ranks", "Rule"]

Shape = tuple[int, ...]
_SCALES = "_scale_inv"


class Part(NamedTuple):
    """A parameter inside of a tensor.

    name: in the checkpoint; {field} stands for what the rule's pattern found. split: the dimension that tensor
    parallelism divides, not counting experts; None: every rank has all. units: the number (Names.units) of pieces that
    are never divided, heads mostly; with more ranks than units, neighbouring ranks have the same.
    """

    name: str
    split: int | None = None
    units: str = ""


class Rule(NamedTuple):
    """A tensor of a framework.

    pattern: its name; {field} stands for one word between dots. parts: the parameters in it, in this order along the
    dimension `along`, not counting experts. experts: the first dimension of parts and tensor are experts, of which a
    rank of expert parallelism has its share; nothing else is divided then. With {expert} in the pattern, the tensor is
    a single expert.
    """

    pattern: str
    parts: tuple[Part, ...]
    along: int = 0
    experts: bool = False


@dataclass(frozen=True)
class Ranks:
    """Which rank of how many this process is, in tensor and in expert parallelism (1: experts are divided by tp).

    experts: the range (first, last + 1) of experts in a stacked tensor, if it is not the ep_rank-th piece of all; each
    expert is then divided by tp.
    """

    tp_rank: int = 0
    tp: int = 1
    ep_rank: int = 0
    ep: int = 1
    experts: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.experts is not None and self.ep != 1:
            raise UsageError(f"experts={self.experts} are named and ep={self.ep}: must be 1 then")
        for name, rank, count in (("tp", self.tp_rank, self.tp), ("ep", self.ep_rank, self.ep)):
            if not 0 <= rank < count:
                raise UsageError(f"{name}_rank={rank} must be in 0..{name}-1, {name}={count}")


ALONE = Ranks()


class _Span(NamedTuple):
    """A box of a parameter, and where in the tensor it begins."""

    name: str
    shape: Shape
    box: Box
    begin: Shape
    scale_of: str | None
    block: Shape


class Names:
    """Translates the tensors of one model. Immutable; any thread.

    rules: the first whose pattern matches applies; a tensor without a match is the parameter of that name, undivided.
    Where the model has no such parameter, the name is tried again without what wrappers of modules that leave
    parameters as they are put into it: `_orig_mod`, `_fsdp_wrapped_module`, `_checkpoint_wrapped_module`, and `module`
    at its beginning.
    shapes: of the checkpoint's parameters, experts stacked: (experts, ...) under one name without a number. units: what
    rules call units, mostly "heads" and "kv_heads". block: elements of a matrix that share an fp8 scale. UsageError,
    which names the rule, for an invalid one.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        shapes: Mapping[str, Shape],
        units: Mapping[str, int] | None = None,
        block: tuple[int, int] = (128, 128),
    ) -> None:
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._units = dict(units or {})
        for rule in rules:
            _check_rule(rule)
        self._rules = [(_compiled(rule.pattern), rule) for rule in rules]
        self._block = block

    def __repr__(self) -> str:
        return f"<Names of {len(self.shapes)} parameters by {len(self._rules)} rules>"

    def holdings(
        self,
        name: str,
        dtype: str,
        shape: Sequence[int],
        region: int,
        offset: int,
        *,
        ranks: Ranks = ALONE,
        box: Box | None = None,
        strides: Sequence[int] | None = None,
        mesh: str = "",
    ) -> list[Holding]:
        """What a framework's tensor is in terms of the checkpoint.

        name, shape: of the tensor that this rank of tensor and expert parallelism has. box: the part of it that is
        here, of an FSDP shard for instance; None: all. strides: bytes, of what is here; None: packed.
        UsageError when the name is unknown, the shape is not what the rules give, or scales are of parts of blocks.
        """
        spans, extent = self._spans(name, ranks)
        if tuple(shape) != extent:
            raise UsageError(f"{name!r} has the shape {tuple(shape)}, must be {extent} for {ranks}")
        here = box if box is not None else tuple((0, n) for n in extent)
        lengths = np.array([[stop - start for start, stop in here]], np.int64)
        steps = strides if strides is not None else c_strides(lengths, ITEM_BYTES[dtype_code(dtype)])[0].tolist()
        found = []
        for span in spans:
            indexed = len(span.shape) - len(extent)  # 1 where the tensor is one expert of a stack
            low = [max(start, at) for (start, _), at in zip(here, span.begin, strict=True)]
            ends = [at + b - a for at, (a, b) in zip(span.begin, span.box[indexed:], strict=True)]
            high = [min(stop, end) for (_, stop), end in zip(here, ends, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            inside = [
                (first + a - at, first + b - at)
                for a, b, at, (first, _) in zip(low, high, span.begin, span.box[indexed:], strict=True)
            ]
            place = offset + sum((a - start) * step for a, (start, _), step in zip(low, here, steps, strict=True))
            held = (*span.box[:indexed], *inside)
            by = (*[0] * indexed, *steps)
            found.append(
                Holding(span.name, dtype, span.shape, held, region, place, by, mesh, span.scale_of, span.block)
            )
        return found

    def _spans(self, name: str, ranks: Ranks) -> tuple[list[_Span], Shape]:
        """The parameters in the tensor, and its shape."""
        scales = name.endswith(_SCALES)
        base = name.removesuffix(_SCALES)
        rule, fields = self._rule_of(base)
        expert = _expert(name, fields.pop("expert")) if "expert" in fields else None
        spans: list[_Span] = []
        at = 0
        for part in rule.parts:
            full = part.name.format(**fields)
            if full not in self.shapes:
                why = "" if any(rule is known for _, known in self._rules) else "no rule fits it, and "
                raise UsageError(f"{name!r}: {why}the model has no parameter {full!r}{meant(full, self.shapes)}")
            shape = self.shapes[full]
            box = self._held(part, rule, full, shape, expert, ranks)
            block: Shape = ()
            if scales:
                block = (*[1] * (len(shape) - 2), *self._block[max(2 - len(shape), 0) :])
                _check_whole_blocks(name, full, shape, box, block)
                if part is not rule.parts[-1]:
                    stacked = rule.experts or expert is not None
                    _check_inner(name, full, box, block, rule.along + stacked)
                box = tuple((start // size, -(-stop // size)) for (start, stop), size in zip(box, block, strict=True))
                shape = tuple(-(-extent // size) for extent, size in zip(shape, block, strict=True))
            inner = box[1:] if expert is not None else box
            along = rule.along + (1 if rule.experts else 0)
            begin = [0] * len(inner)
            if along < len(inner):
                begin[along] = at
                at += inner[along][1] - inner[along][0]
            target = full + _SCALES if scales else full
            spans.append(_Span(target, shape, box, tuple(begin), full if scales else None, block))
        _check_alike(name, spans, rule, expert is not None)
        first = spans[0].box[1:] if expert is not None else spans[0].box
        extent = [stop - start for start, stop in first]
        if rule.along + (1 if rule.experts else 0) < len(extent):
            extent[rule.along + (1 if rule.experts else 0)] = at
        return spans, tuple(extent)

    def _rule_of(self, name: str) -> tuple[Rule, dict[str, str]]:
        """Of the name as it is; without wrappers if the model has that."""
        found = self._rule(name)
        bare = unwrapped(name)
        if bare != name and not self._has(*found) and self._has(*(other := self._rule(bare))):
            return other
        return found

    def _has(self, rule: Rule, fields: Mapping[str, str]) -> bool:
        return all(part.name.format(**fields) in self.shapes for part in rule.parts)

    def _rule(self, name: str) -> tuple[Rule, dict[str, str]]:
        for pattern, rule in self._rules:
            if match := pattern.fullmatch(name):
                return rule, match.groupdict()
        literal = name.replace("{", "{{").replace("}", "}}")  # it is formatted, as a part's name
        return Rule(name, (Part(literal),)), {}

    def _held(self, part: Part, rule: Rule, name: str, shape: Shape, expert: int | None, ranks: Ranks) -> Box:
        box = [(0, extent) for extent in shape]
        stacked = rule.experts or expert is not None
        if expert is not None:
            if expert >= shape[0]:
                raise UsageError(f"{name!r} has {shape[0]} experts, there is no number {expert}")
            box[0] = (expert, expert + 1)
        if rule.experts and ranks.ep > 1:
            box[0] = _piece(name, shape[0], shape[0], ranks.ep_rank, ranks.ep)
            return tuple(box)
        if rule.experts and ranks.experts is not None:
            first, stop = box[0] = ranks.experts
            if not 0 <= first < stop <= shape[0]:
                raise UsageError(f"{name!r} has {shape[0]} experts, there are no numbers {first}..{stop - 1}")
        dim = None if part.split is None else part.split + stacked
        if dim is not None and dim < len(shape):
            if part.units and part.units not in self._units:
                there = ", ".join(map(repr, self._units)) or "none"
                raise UsageError(f"{name!r} is divided by {part.units!r}, and units of these Names has {there}")
            units = self._units[part.units] if part.units else shape[dim]
            box[dim] = _piece(name, shape[dim], units, ranks.tp_rank, ranks.tp)
        return tuple(box)


def _check_rule(rule: object) -> None:
    """UsageError for what no tensor could be translated by."""
    if not isinstance(rule, Rule):
        raise UsageError(f"{rule!r:.80} is no Rule: rules are a sequence of them")
    what = f"rule {rule.pattern!r}"
    fields = _fields(what, rule.pattern)
    if twice := sorted({field for field in fields if fields.count(field) > 1}):
        raise UsageError(f"{what}: {{{twice[0]}}} is in it twice")
    parts: object = rule.parts  # whatever was given
    if isinstance(parts, Part) or not rule.parts or not all(isinstance(part, Part) for part in rule.parts):
        raise UsageError(f"{what}: parts must be one Part or more, in a tuple such as (Part('q', 0),)")
    if rule.along < 0:
        raise UsageError(f"{what}: along is {rule.along}, must be 0 or more")
    for part in rule.parts:
        known = [field for field in fields if field != "expert"]
        if unknown := [field for field in _fields(what, part.name) if field not in known]:
            why = "parts are of all experts" if unknown[0] == "expert" else "the pattern has no such field"
            raise UsageError(f"{what}: {{{unknown[0]}}} in {part.name!r}: {why}")
        if part.split is not None and part.split < 0:
            raise UsageError(f"{what}: split of {part.name!r} is {part.split}, must be 0 or more, or None")


def _fields(what: str, text: str) -> list[str]:
    """The fields in braces."""
    try:
        found = [(field, more, how) for _, field, more, how in string.Formatter().parse(text) if field is not None]
    except (ValueError, TypeError) as error:
        raise UsageError(f"{what}: {text!r}: {error}") from None
    for field, more, how in found:
        if more or how or not field.isidentifier():
            raise UsageError(f"{what}: {text!r}: a field must be a word in braces, such as {{layer}}")
    return [field for field, _, _ in found]


def _check_alike(name: str, spans: Sequence[_Span], rule: Rule, is_expert: bool) -> None:
    """Concatenated parameters may differ in that dimension only."""
    along = rule.along + rule.experts + is_expert
    kinds = []
    for span in spans:
        extent = [stop - start for start, stop in span.box]
        if len(spans) > 1 and along >= len(extent):
            raise UsageError(f"{name!r}: {span.name!r} has no dimension {along}, along which the parts lie")
        kinds.append(extent[:along] + extent[along + 1 :])
        if kinds[-1] != kinds[0]:
            raise UsageError(
                f"{name!r}: {spans[0].name!r} of {spans[0].shape} and {span.name!r} of {span.shape} do not fit one "
                f"behind the other along dimension {along}: {_extents(spans[0].box)} and {_extents(span.box)} are here"
            )


def _extents(box: Box) -> str:
    return " x ".join(str(stop - start) for start, stop in box)


def _check_whole_blocks(name: str, full: str, shape: Shape, box: Box, block: Shape) -> None:
    """A rank that has part of a block would get the scale of all of it, and count blocks from its own beginning."""
    for dim, ((start, stop), extent, size) in enumerate(zip(box, shape, block, strict=True)):
        if start % size or (stop % size and stop != extent):
            raise UsageError(
                f"{name!r}: this rank has {start}:{stop} of the {extent} of dimension {dim} of {full!r}, which is not "
                f"in whole fp8 blocks of {size}: no kernel reads such scales right. Next: fewer ranks of tensor "
                "parallelism, or divide experts by expert parallelism"
            )


def _check_inner(name: str, full: str, box: Box, block: Shape, along: int) -> None:
    """In a fused tensor the next parameter has to begin at a block boundary: kernels count blocks over all rows
    together, and vLLM refuses such a layer (its validate_fp8_block_shape).
    """
    if along < len(box) and (rows := box[along][1] - box[along][0]) % block[along]:
        raise UsageError(
            f"{name!r}: {full!r} has {rows} of dimension {along} here, which is not in whole fp8 blocks of "
            f"{block[along]}, and another parameter lies behind it: no kernel reads such scales right"
        )


def _expert(name: str, word: str) -> int:
    if not re.fullmatch("[0-9]+", word):
        raise UsageError(f"{name!r}: {word!r} stands where the number of an expert should")
    return int(word)


def _piece(name: str, extent: int, units: int, rank: int, count: int) -> tuple[int, int]:
    if extent % units or (units % count and count % units):
        raise UsageError(f"{name!r}: {extent} rows or columns in {units} units cannot be divided by {count} ranks")
    pieces = min(units, count)
    size = extent // pieces
    index = rank // (count // pieces)
    return index * size, (index + 1) * size


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^.]+)", re.escape(pattern)))
