"""What nodes tell beside their tensors, read without believing it: what cannot be is an error."""

from typing import Any

from fcil.deploy.messages import Reply, shown
from fcil.deploy.registry import normal
from fcil.federation.calls import Answered, Origin

MOST_NAMES, LONGEST_NAME = 10_000, 200  # of classes that a node may tell, and letters in each


def answer_of(reply: Reply, most: int) -> Answered:
    """Read an answer: its tensors as they came, which are judged at the door."""
    facts = reply.facts
    for name, tensor in reply.tensors.items():
        if tensor.is_complex():
            raise ValueError(f"{shown(name, 60)} is complex")
    origin = Origin(*(facts[name] for name in Origin._fields))
    kept, images = _count(facts["kept"], 2**53), _count(facts["images"], most)
    return Answered(dict(reply.tensors), kept, float(facts["loss"]), images, origin)


def counts_of(reply: Reply, classes: int, most: int) -> dict[str, Any]:
    """Read what a node counts, by class: right answers, images held out, images trained on so far."""
    counts = {key: [_count(n, most) for n in reply.facts[key]] for key in ("correct", "total", "held")}
    if any(len(found) != classes for found in counts.values()):
        raise ValueError(f"it does not count {classes} classes")
    if any(c > n for c, n in zip(counts["correct"], counts["total"], strict=True)):
        raise ValueError("it has more right answers than images")
    return {**counts, "classes": classes_of(reply, most)}


def classes_of(reply: Reply, most: int) -> dict[str, int]:
    """Read which classes a node says it has, and how many images of each."""
    told = reply.facts["classes"]
    if len(told) > MOST_NAMES:
        raise ValueError(f"it tells of {len(told):,} classes, and {MOST_NAMES:,} are allowed")
    for name in told:
        if not isinstance(name, str) or not normal(name) or len(name) > LONGEST_NAME:
            raise ValueError(f"{shown(name, 60)!r} is no class; a name has 1 to {LONGEST_NAME} letters")
    return {name: _count(n, most) for name, n in told.items()}


def name_of(reply: Reply) -> str:
    """Read what a node calls itself."""
    told = reply.facts["name"]
    if not isinstance(told, str) or not told.strip() or len(told) > LONGEST_NAME:
        raise ValueError(f"{shown(told, 60)!r} is no name of a node; it has 1 to {LONGEST_NAME} letters")
    return shown(told)


def _count(told: Any, most: int) -> int:
    if not isinstance(told, int) or not 0 <= told <= most:
        raise ValueError(f"it counts {shown(told, 30)}; allowed are 0 to {most:,}")
    return told
