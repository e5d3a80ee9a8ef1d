"""Which key did the user mean?"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from trainer.config.schema import ENGINES, leaves

LIKE = 0.6  # similarity below which a name is no suggestion
COUNT = 3
# Keys of one engine whose counterpart in the other has another name.
COUNTERPARTS = {
    "lr_scheduler_type": "lr_decay_style",
    "min_lr_ratio": "min_lr",
    "fsdp_config": "megatron",
    "fsdp": "megatron",
}
COUNTERPARTS |= {new: old for old, new in COUNTERPARTS.items() if new != "megatron"}


def distance(a: str, b: str) -> int:
    """Edit distance with insertions and deletions only: len(a) + len(b) - 2 x longest common subsequence."""
    row = [0] * (len(b) + 1)
    for x in a:
        previous, row = row, [0]
        for j, y in enumerate(b):
            row.append(previous[j] + 1 if x == y else max(row[j], previous[j + 1]))
    return len(a) + len(b) - 2 * row[-1]


def similarity(a: str, b: str) -> float:
    """1 for equal names, 0 for names without a common letter."""
    return 1 - distance(a, b) / max(1, len(a) + len(b))


def closest(name: str, names: Iterable[str], count: int = COUNT) -> list[str]:
    """The most similar names; ties keep their order."""
    found = sorted((distance(name, other), index, other) for index, other in enumerate(names))
    return [other for _, _, other in found if similarity(name, other) >= LIKE][:count]


def suggestions(key: str, engine: str) -> list[str]:
    """Up to three full names: the same section first, then the same leaf elsewhere, then whole paths."""
    known = leaves(engine)
    section, _, leaf = key.rpartition(".")
    siblings = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == section]
    prefix = f"{section}." if section else ""
    found = [prefix + name for name in closest(leaf, siblings)]
    same_leaf = sorted(
        (name for name in known if name.rpartition(".")[2] == leaf),
        key=lambda name: (-_common_tail(key, name), distance(key, name)),
    )
    found += [name for name in same_leaf if name not in found]
    return (found or closest(key, known))[:COUNT]


def _common_tail(key: str, name: str) -> int:
    """Parts that agree from the end: 2 for trainer.rollout.group.n and actor_rollout_ref.rollout.n."""
    pairs = zip(reversed(key.split(".")), reversed(name.split(".")), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def other_engine(key: str, engine: str) -> str | None:
    """Text for a key that exists with the other engine only; None otherwise."""
    other = next(name for name in ENGINES if name != engine)
    table = leaves(other)
    if not any(key == name or key.startswith(name + ".") or name.startswith(key + ".") for name in table):
        return None
    parts = key.split(".")
    swapped = [
        ".".join([*parts[:i], COUNTERPARTS[part], *parts[i + 1 :]])
        for i, part in enumerate(parts)
        if part in COUNTERPARTS
    ]
    twin = next((name for name in swapped if name in leaves(engine)), None)
    owner = f"{'.'.join(parts[-2:])} belongs to model_engine={other}"
    return f"{owner}; {engine}: {twin.rpartition('.')[2]}" if twin else owner


def abbreviated(names: list[str]) -> str:
    """`a.b.c, .d, .e`: names of the first one's section are shortened to their leaf."""
    section = names[0].rpartition(".")[0]
    rest = [f".{name.rpartition('.')[2]}" if name.rpartition(".")[0] == section else name for name in names[1:]]
    return ", ".join([names[0], *rest])
