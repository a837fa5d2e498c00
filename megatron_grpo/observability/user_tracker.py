"""A tracker of the user's own: a class, or a function that makes one."""

from __future__ import annotations

import inspect
from typing import Any

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.run_schema import LoggerConfig
from megatron_grpo.losses.named_formula import NamedFormula, load_formula, make_formula

INPUTS = {
    "run_dir": "folder of the run, a Path",
    "settings": "the configuration, by section and key, with passwords and tokens hidden",
    "resume_step": "last step that counts of the run's earlier starts; None: it begins",
}
"""Arguments that a tracker may take, by the name of the parameter."""
METHODS = {"log": ("step", "values"), "log_table": ("step", "name", "rows"), "close": ("failed",)}
"""Methods of a tracker, with their parameters."""


def make_tracker(logger: LoggerConfig, folders: tuple[str, ...]) -> NamedFormula | None:
    """Load the user's class or function of a tracker; None: no setting.

    RunError: it cannot be imported or called, has other options, or is a class without a tracker's methods.
    """
    if logger.tracker is None:
        return None
    setting, options = f"logger.tracker={logger.tracker}", logger.tracker_options
    maker = make_formula(setting, logger.tracker, inputs=INPUTS, keys={}, options=options, folders=folders)
    value = load_formula(logger.tracker, folders)
    if inspect.isclass(value):
        _require_methods(setting, value, bound=False)
    return maker


def open_tracker(maker: NamedFormula, **inputs: Any) -> Any:
    """Call the user's class or function; RunError: it raises, or makes no tracker."""
    tracker = maker(**inputs)
    _require_methods(maker.setting, tracker, bound=True)
    return tracker


def _require_methods(setting: str, owner: Any, *, bound: bool) -> None:
    """Raise RunError unless a class or object has the methods of a tracker."""
    for name, parameters in METHODS.items():
        method, form = getattr(owner, name, None), f"{name}({', '.join(parameters)})"
        if not callable(method):
            raise RunError(f"{setting} has no method {form}")
        try:
            inspect.signature(method).bind(*(() if bound else (None,)), *parameters)
        except TypeError as error:
            raise RunError(f"{setting} is called as {form}, and its method does not fit: {error}") from None
        except ValueError:  # a built-in function without a signature
            continue
