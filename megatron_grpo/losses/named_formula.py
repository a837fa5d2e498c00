"""Formulas by name: functions of this package or of the user, and the arguments that the configuration gives them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.function_options import convert_options, list_parameters
from megatron_grpo.config.paths import import_callable, make_importable


@dataclass(frozen=True, slots=True)
class NamedFormula:
    """A function and its arguments, for any process.

    Other processes import it when they first call it.
    """

    setting: str  # KEY=VALUE, for messages
    path: str  # package.module.function
    folders: tuple[str, ...]  # the user's folders, which other processes import from
    inputs: tuple[str, ...]  # names of the tensors that it takes
    arguments: Mapping[str, Any]  # values of keys and options

    def __call__(self, **inputs: Any) -> Any:
        """Call the function with the inputs that it takes; RunError if a user's raises."""
        function = load_formula(self.path, self.folders)
        try:
            return function(**{name: inputs[name] for name in self.inputs}, **self.arguments)
        except Exception as error:
            if not self.folders:
                raise
            raise RunError(f"{self.setting} raised {type(error).__name__}: {error}") from error


@functools.cache
def load_formula(path: str, folders: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Import a function, once a process; RunError if it cannot be imported or called."""
    make_importable(folders)
    return import_callable("function", path)


def make_formula(
    setting: str,
    path: str,
    *,
    inputs: Collection[str],
    keys: Mapping[str, Any],
    options: Mapping[str, Any],
    folders: tuple[str, ...],
) -> NamedFormula:
    """Make a formula from the names of its function's parameters.

    Args:
        inputs: names of tensors; a parameter of such a name gets the tensor.
        keys: values of the configuration's keys; a parameter of such a name gets the value.
        options: values of all other parameters, which are converted to their annotations.

    Raises RunError, which names all problems of the options, or a parameter without a value.
    """
    parameters = list_parameters(load_formula(path, folders))
    free = {name: parameter for name, parameter in parameters.items() if name not in {*inputs, *keys}}
    arguments, problems = convert_options(path.rpartition(".")[2], free, options)
    if problems:
        raise RunError("; ".join(f"{name} {text}" for name, text in problems))
    arguments |= {name: value for name, value in keys.items() if name in parameters}
    return NamedFormula(setting, path, folders, tuple(name for name in parameters if name in inputs), arguments)
