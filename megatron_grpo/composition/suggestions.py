"""What a user most likely meant by a key that the schema does not have."""

from __future__ import annotations

import difflib

from megatron_grpo.composition.foreign_names import Translation, loosely_translated, missing_here, translated
from megatron_grpo.config.errors import Problem
from megatron_grpo.config.keys import keys
from megatron_grpo.config.loop_keys import is_foreign_to, named_for, other_than

_MISSPELT, _ALIKE, _ALIKE_IN_SECTION, _ALIKE_SECTIONS = 0.9, 0.8, 0.7, 0.55
"""Likeness (difflib's ratio) from which a key is suggested: of whole names, alone; of whole names; of whole names in
the section that the user named; and of the sections where the last words are the same. Below, nothing is suggested: a
far-fetched name sends the user the wrong way."""
_MOST_SUGGESTED = 2
_COUNTERPART = {"grpo.num_iterations": "ppo.ppo_epochs", "ppo.ppo_epochs": "grpo.num_iterations"}


def unknown_key(name: str, algorithm: str) -> Problem:
    """The complaint about a key that the schema does not have.

    Args:
        name: name of the unknown key, with its dots.
        algorithm: the one that runs, whose names are suggested.
    """
    if name.split(".")[0] == "hydra":
        return Problem(name, "Hydra's own settings have no effect here; run_dir chooses where a run writes")
    foreign = translated(name)
    if foreign is not None:
        return Problem(name, f"unknown key; {foreign.framework}'s {foreign.name} is {_here(foreign, algorithm)} here")
    missing = missing_here(name)
    if missing is not None:
        return Problem(name, f"unknown key; {missing} is not supported")
    alike = nearest(name, algorithm)
    if alike:
        return Problem(name, f"unknown key; did you mean {' or '.join(alike)}?")
    foreign = loosely_translated(name)
    if foreign is not None:
        return Problem(name, f"unknown key; did you mean {_here(foreign, algorithm)}?")
    return Problem(name, "unknown key; --cfg job shows all keys")


def nearest(name: str, algorithm: str) -> list[str]:
    """The keys that a run of an algorithm has and that are most like a name, best first; none when none is."""
    known = _names_in(algorithm, name)
    misspelt = difflib.get_close_matches(name, known, n=1, cutoff=_MISSPELT)
    if misspelt:
        return misspelt
    section, word = name.rpartition(".")[0], name.rpartition(".")[2]
    same_word = [key for key in known if key.rpartition(".")[2] == word]
    if section:
        sections = {key.rpartition(".")[0]: key for key in same_word}
        close = difflib.get_close_matches(section, sections, n=1, cutoff=_ALIKE_SECTIONS)
        beside = [key for key in known if key.partition(".")[0] == name.partition(".")[0]]
        return (
            [sections[one] for one in close]
            or difflib.get_close_matches(name, beside, n=_MOST_SUGGESTED, cutoff=_ALIKE_IN_SECTION)
            or difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE)
        )
    if not same_word:
        words = difflib.get_close_matches(word, {key.rpartition(".")[2] for key in known}, n=1, cutoff=_ALIKE)
        same_word = [key for key in known if key.rpartition(".")[2] in words]
    return same_word if len(same_word) <= _MOST_SUGGESTED else []


def _names_in(algorithm: str, name: str) -> list[str]:
    """All keys of a run under the names to suggest: with the user's own name of an environment; without the value
    model's, which are called as the policy's are, unless the user's begins as theirs do."""
    section, _, rest = name.partition(".")
    environment = rest.partition(".")[0] if section == "env" else ""
    own = (key for key in keys() if not key.endswith("<field>"))  # preflight knows those that are passed on
    names = (named_for(algorithm, key) for key in own if not is_foreign_to(algorithm, key))
    names = (one for one in names if section == "value" or not one.startswith("value."))
    return [one.replace("<name>", environment or "NAME") for one in names]


def _here(foreign: Translation, algorithm: str) -> str:
    return " and ".join(_key_here(key, algorithm) for key in foreign.keys)


def _key_here(key: str, algorithm: str) -> str:
    """The key in a run of an algorithm; with what it needs when only the other one reads it."""
    if not is_foreign_to(algorithm, key):
        return named_for(algorithm, key)
    return _COUNTERPART.get(key) or f"{key} (with algorithm={other_than(algorithm)})"
