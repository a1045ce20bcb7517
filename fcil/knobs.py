"""Knobs: dataclass fields that carry their meaning and their range, and can be read from text.

A method's `Config`, the `Benchmark` and the `Protocol` are made of them, so that the command line, `fcil methods NAME`
and the error messages need no second table.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, TypeVar, get_type_hints

from fcil.errors import UserError, unknown

T = TypeVar("T")
WHOLE = 2**53  # whole numbers beyond are no size of anything


def knob(
    default: Any = MISSING,
    meaning: str = "",
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """Declare a dataclass field with a `meaning` and the values it allows."""
    limits = (least, above, most, below)
    return field(default=default, metadata={"meaning": meaning, "range": limits, "choices": choices})


@dataclass(frozen=True)
class Knob:
    """One field of a settings class, as a person sees it."""

    name: str
    kind: type
    default: Any
    meaning: str
    least: float | None
    above: float | None
    most: float | None
    below: float | None
    choices: tuple[str, ...]

    @property
    def allowed(self) -> str:
        """Say which values this knob takes."""
        if self.choices:
            return ", ".join(self.choices)
        if self.kind is bool:
            return "true, false"
        if self.kind is str:
            return "any text"
        bounds = [
            f"{word} {limit:g}"
            for word, limit in (
                ("at least", self.least),
                ("above", self.above),
                ("at most", self.most),
                ("below", self.below),
            )
            if limit is not None
        ]
        return " ".join(["whole numbers" if self.kind is int else "numbers", " and ".join(bounds)]).strip()

    def read(self, text: str) -> Any:
        """Turn what the user typed into a value, or say what is allowed."""
        try:
            return self.check(_parse(self.kind, text))
        except ValueError:
            raise self._refusal(text) from None

    def check(self, value: Any) -> Any:
        """Return `value` if it is allowed; a whole number passes for a float."""
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1e308:
            value = float(value)
        if type(value) is not self.kind or (self.choices and value not in self.choices) or not self._in_range(value):
            raise self._refusal(value)
        return value

    def _in_range(self, value: Any) -> bool:
        if self.kind not in (int, float):
            return True
        return (
            value == value
            and abs(value) < (WHOLE if self.kind is int else float("inf"))
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def _refusal(self, value: Any) -> UserError:
        too_large = self.kind is int and type(value) is int and value >= WHOLE
        allowed = f"{self.allowed}, below 2^53" if too_large else self.allowed
        return UserError(f"{self.name}={value} is not allowed; {self.name} takes {allowed}")


def knobs(cls: type) -> dict[str, Knob]:
    """Return every knob of a settings class, by name."""
    kinds = get_type_hints(cls)
    found = {}
    for f in fields(cls):
        least, above, most, below = f.metadata.get("range", (None, None, None, None))
        default = None if f.default is MISSING else f.default
        meaning, choices = f.metadata.get("meaning", ""), f.metadata.get("choices", ())
        found[f.name] = Knob(f.name, kinds[f.name], default, meaning, least, above, most, below, choices)
    return found


def changed(settings: T, values: Mapping[str, Any]) -> T:
    """Return `settings` with some knobs set, each from text or from a value of its own type."""
    known = knobs(type(settings))
    new = {}
    for name, value in values.items():
        if name not in known:
            raise unknown("setting", name, known)
        new[name] = known[name].read(value) if isinstance(value, str) else known[name].check(value)
    return replace(settings, **new)  # type: ignore[type-var]


def _parse(kind: type, text: str) -> Any:
    if kind is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if text.lower() not in words:
            raise ValueError(text)
        return words[text.lower()]
    return kind(text)
