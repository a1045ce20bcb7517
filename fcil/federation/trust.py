"""What comes from a client is not trusted: which replies are let in, and why the others are not.

Every reply of every transport passes `Judge` before it is averaged, summed or seen by a server. It must answer this
question of this experiment; have the fields of its record, and of each the shape and type of what was sent or, where
nothing of that name was sent, of what most replies have; hold only finite numbers; and count no less than nothing.
With `outliers`, what it says of a class must also lie near what the others say. docs/trust.md tells what this stops
and what it does not.

Replies are judged some at a time, in one reading of values: a GPU is waited for once, and nothing is copied.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from fcil.federation.calls import Answered, Origin
from fcil.federation.outliers import far_out
from fcil.federation.privacy import covered
from fcil.records import NUMBERS, ByClass, Weights, flatten, unflatten
from fcil.scenario.benchmarks import Protocol

HELD = {"cpu": 2**26, "cuda": 2**31}  # bytes of replies that are held back to be judged together
FEWEST = 3  # replies that are always held: where two disagree, the third decides
KINDS = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32,
         torch.int64, torch.bool}  # fmt: skip
Form = tuple[tuple[int, ...], torch.dtype]


@dataclass
class Verdict:
    """A reply that is let in, or why it is not."""

    client: int
    answered: Answered  # its reply is a record, where it is let in
    flat: Weights  # what is in it
    why: str = ""
    diverged: bool = False  # it trained, and what came of it is not finite

    @property
    def size(self) -> int:
        """Bytes of the reply."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.flat.values())


class Judge:
    """Judges the replies to one question."""

    def __init__(
        self, kind: type, sent: Any, origin: Origin, classes: int, protocol: Protocol,
        usual: dict[str, Form] | None = None,
    ):  # fmt: skip
        self.usual = {} if usual is None else usual  # what replies say of a class looks like, from earlier questions
        self.kind, self.kinds, self.origin, self.protocol = kind, get_type_hints(kind), origin, protocol
        self.classes = {str(j) for j in range(classes)}
        self.varies = {part.name: part.metadata.get("varies", "") for part in fields(kind)}
        networks = {name for name, its in get_type_hints(type(sent)).items() if its == Weights == self.kinds.get(name)}
        self.sent = {name: _form(tensor) for name, tensor in flatten(sent).items() if _field(name) in networks}
        self.networks = {_field(name) for name in self.sent}  # fields of which it is known what belongs in them
        self.forms: dict[str, Form | None] = dict(self.usual)  # what the others look like, once enough of them came
        self.names: dict[str, set[str]] = {}
        self.parts: dict[tuple[str, Form], str] = {}  # what was found of a tensor's name and form

    def verdicts(self, stream: Iterable[tuple[int, Answered]]) -> Iterator[Verdict]:
        """Judge replies; they come out in the order in which they came."""
        held: list[Verdict] = []
        weight = 0
        for client, answered in stream:
            flat = _flat(answered.reply)
            held.append(Verdict(client, answered, flat, self._unfit(answered, flat)))
            weight += held[-1].size
            room = HELD["cuda" if any(tensor.is_cuda for tensor in flat.values()) else "cpu"]
            if not self.protocol.outliers and len(held) >= FEWEST and weight >= room:
                yield from self._judged(held)
                held, weight = [], 0
        yield from self._judged(held)

    def _judged(self, held: list[Verdict]) -> list[Verdict]:
        """Compare replies with each other, and look at their numbers."""
        self._settle([one.flat for one in held if not one.why])
        for one in held:
            one.why = one.why or self._unlike_others(one.flat)
        self._look_at_numbers([one for one in held if not one.why])
        if self.protocol.outliers:
            good = [one for one in held if not one.why]
            for one, why in zip(
                good, far_out([one.flat for one in good], self.kind, self.protocol.outliers), strict=True
            ):
                one.why = why
        for one in held:
            if not one.why and isinstance(one.answered.reply, dict):
                one.answered = one.answered._replace(reply=unflatten(self.kind, one.flat))
        return held

    def _unfit(self, answered: Answered, flat: Weights) -> str:
        """Say what is wrong with a reply, whatever the others are."""
        if answered.origin is not None and (why := _another_question(answered.origin, self.origin)):
            return why
        if not isinstance(answered.reply, dict | self.kind):
            return f"is a {type(answered.reply).__name__}, not a {self.kind.__name__}"
        if answered.kept < 0 or answered.images < 0:
            return "claims to keep, or to have trained on, less than nothing"
        for name, its in self.kinds.items():
            if get_origin(its) is not dict and name not in flat:
                return f"lacks {name}"
        for part in ((name, _form(tensor)) for name, tensor in flat.items()):
            if part not in self.parts:
                self.parts[part] = self._unfit_part(*part)
            if why := self.parts[part]:
                return why
        return ""

    def _unfit_part(self, name: str, form: Form) -> str:
        """Say why a tensor of this form cannot be in such a record under its name."""
        own, slash, key = name.partition("/")
        its = self.kinds.get(own)
        if its is None or bool(slash) != (get_origin(its) is dict):
            return f"has {_shown(name)}, which is no part of a {self.kind.__name__}"
        if its in NUMBERS and form != ((), NUMBERS[its]):
            return f"has {_said(form)} as {_shown(name)}, which is one {its.__name__}"
        if form[1] not in KINDS:
            return f"has {_said(form)} as {_shown(name)}; numbers are real, whole, or true and false"
        if its == ByClass and own.startswith("count") and form[0] and not self.varies[own]:
            return f"has {_said(form)} as {_shown(name)}, which is one number"
        if slash and get_args(its)[0] is int and key not in self.classes:
            return f"speaks of class {_shown(key)}; there is room for {len(self.classes)}"
        if own in self.networks and name not in self.sent:
            return f"has {_shown(name)}, which was not sent to it"
        if name in self.sent and form != self.sent[name]:
            return f"has {_said(form)} as {_shown(name)}; what was sent is {_said(self.sent[name])}"
        return ""

    def _settle(self, flats: Sequence[Weights]) -> None:
        """Learn from the replies what those fields look like of which nothing was sent."""
        votes = defaultdict[str, Counter[Form]](Counter)
        for flat in flats:
            for key, form in {(self._key(name), self._rows(name, tensor)) for name, tensor in flat.items()}:
                votes[key][form] += 1
        for key, found in votes.items():
            first, second = (*found.most_common(2), (None, 0))[:2]
            self.forms.setdefault(key, first[0] if first[1] > second[1] else None)
            if first[0] and first[1] > max(1, second[1]) and self.kinds[_field(key)] == ByClass:
                self.usual.setdefault(key, first[0])  # one alone, who has a class that nobody has, decides nothing
        for own, its in self.kinds.items():
            if its == Weights and self.varies[own] != "names" and own not in self.names and flats:
                having = Counter(name for flat in flats for name in flat if _field(name) == own)
                self.names[own] = {name for name, number in having.items() if number > len(flats) / 2}

    def _unlike_others(self, flat: Weights) -> str:
        for name, tensor in flat.items():
            usual = self.forms[self._key(name)]
            if usual is None:
                return (
                    f"differs from another in the shape of {_shown(name)}, and there are too few to say which is right"
                )
            if self._rows(name, tensor) != usual:
                return f"has {_said(tensor)} as {_shown(name)}; most replies have {_said(usual)}"
        absent = next((name for names in self.names.values() for name in sorted(names) if name not in flat), "")
        return f"lacks {_shown(absent)}" if absent else ""

    def _look_at_numbers(self, good: Sequence[Verdict]) -> None:
        """Refuse what is not finite and what counts too little or too much, in one reading of all replies."""
        asked: list[tuple[Verdict, str, str, Tensor]] = []
        for one in good:
            floats = {n: t for n, t in one.flat.items() if t.is_floating_point() and t.numel()}
            if floats:  # a norm is finite where all numbers are, up to 1e19, which no honest one reaches
                whole = [t.detach() if t.dtype.itemsize > 2 else t.float() for t in floats.values()]
                asked += [
                    (one, name, "norm", norm) for name, norm in zip(floats, torch._foreach_norm(whole, 2), strict=True)
                ]
            if one.answered.images:
                asked.append((one, "its loss", "norm", torch.as_tensor(one.answered.loss)))
            counting = {name: t for name, t in one.flat.items() if t.numel() and self._most(name) is not None}
            asked += [(one, name, "least", tensor.min()) for name, tensor in counting.items()]
            asked += [(one, name, "most", tensor.max()) for name, tensor in counting.items()]
        for (one, name, what, _), number in zip(asked, _numbers([number for *_, number in asked]), strict=True):
            if what == "norm" and not math.isfinite(number):
                one.why, one.diverged = f"has numbers in {_shown(name)} that are not finite", one.answered.images > 0
            elif what == "least" and number < 0:
                one.why = one.why or f"counts {number:g} as {_shown(name)}, which is less than nothing"
            elif what == "most" and number > (most := self._most(name) or 0):
                one.why = one.why or f"counts {number:,.0f} as {_shown(name)}; most_images allows {most:,.0f}"

    def _key(self, name: str) -> str:
        """Return under which name tensors are compared: all classes of a field look alike."""
        own = _field(name)
        return own if get_args(self.kinds[own])[:1] == (int,) or self.varies[own] == "names" else name

    def _rows(self, name: str, tensor: Tensor) -> Form:
        shape, kind = _form(tensor)
        return (shape[1:] if self.varies[_field(name)] == "rows" else shape), kind

    def _most(self, name: str) -> float | None:
        """Return the most that a tensor may count, or None where it counts nothing."""
        own, _, key = name.partition("/")
        its = self.kinds[own]
        if self.protocol.dp == "local" and own in covered(self.kind):
            return None  # noise makes anything of it
        counts = own.startswith("count") or (its == Weights and key.startswith("count"))
        if not counts and its is not int:
            return None
        return self.protocol.most_images if counts and its is not Tensor else math.inf


def _another_question(said: Origin, asked: Origin) -> str:
    """Say how a reply belongs to another question, if it does."""
    if said.experiment != asked.experiment:
        return f"is of another experiment, {_shown(said.experiment)}"
    if said.version != asked.version:
        return f"is of fcil {_shown(said.version)}; here is fcil {asked.version}"
    if said != asked:
        return f"answers question {_shown(said.step)} ({_shown(said.answer)}), not {asked.step} ({asked.answer})"
    return ""


def _numbers(tensors: Sequence[Tensor]) -> list[float]:
    """Return the values of many tensors of one number, with one wait for each device and type."""
    alike = defaultdict[Any, list[int]](list)
    for i, tensor in enumerate(tensors):
        alike[tensor.device, tensor.dtype].append(i)
    stacked = [(where, torch.stack([tensors[i] for i in where])) for where in alike.values()]
    found = {i: float(n) for where, values in stacked for i, n in zip(where, values.tolist(), strict=True)}
    return [found[i] for i in range(len(tensors))]


def _flat(reply: Any) -> Weights:
    """Return the tensors of a reply; nothing where it has none."""
    if isinstance(reply, dict):
        return {name: tensor for name, tensor in reply.items() if isinstance(tensor, Tensor)}
    return flatten(reply) if is_dataclass(reply) else {}


def _shown(words: Any) -> str:
    """Return what a client wrote as one short line of a log."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(words)[:60])


def _field(name: str) -> str:
    return name.partition("/")[0]


def _form(tensor: Tensor) -> Form:
    return tuple(tensor.shape), tensor.dtype


def _said(what: Tensor | Form) -> str:
    shape, kind = _form(what) if isinstance(what, Tensor) else what
    return f"{str(kind).removeprefix('torch.')} of shape {shape}"
