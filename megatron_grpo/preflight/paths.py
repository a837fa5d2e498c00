"""Whether files can be read and folders be written, found out by trying: permissions alone do not say it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron_grpo.config.errors import Problem, shown


def unreadable(path: str | Path) -> str | None:
    """Why a file cannot be read; None: it can."""
    try:
        with open(path, "rb") as file:
            file.read(1)
    except (FileNotFoundError, NotADirectoryError):
        return "no such file"
    except IsADirectoryError:
        return "is a folder, not a file"
    except PermissionError:
        return "no permission to read it"
    except (OSError, ValueError) as error:  # ValueError: a NUL character, which no name has
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"
    return None


def unlistable(path: str | Path) -> str | None:
    """Why a folder cannot be looked into; None: it can."""
    try:
        os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return "no such folder"
    except PermissionError:
        return "no permission to read it"
    except (OSError, ValueError) as error:
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"
    return None


def unwritable(key: str, given: str) -> Iterator[Problem]:
    """Why nothing can be written to a folder that may not exist yet; leaves nothing behind."""
    subject = f"{key}={shown(given)}"
    if "\0" in given:
        yield Problem(subject, "has a NUL character, which no name has")
        return
    folder = Path(os.path.abspath(given))
    if os.path.islink(folder) and not os.path.exists(folder):
        yield Problem(subject, "is a link that leads nowhere; delete it, or choose another folder")
        return
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not os.path.isdir(existing):
        yield Problem(subject, f"{shown(existing)} is a file, not a folder")
        return
    try:
        longest = os.pathconf(existing, "PC_NAME_MAX")
        missing = folder.relative_to(existing).parts
        too_long = next((part for part in missing if len(os.fsencode(part)) > longest), None)
        if too_long is not None:
            yield Problem(subject, f"{shown(too_long)} is too long for a name, which has at most {longest} bytes")
            return
        with tempfile.TemporaryDirectory(dir=existing, prefix=".megatron_grpo_"):
            pass
    except PermissionError:
        yield Problem(subject, f"no permission to write in {existing}")
    except OSError as error:
        yield Problem(subject, f"nothing can be written in {existing}: {error.strerror}")
