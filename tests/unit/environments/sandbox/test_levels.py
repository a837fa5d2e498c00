"""How strong a sandbox a machine allows, and what is told where it is less than is required."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_grpo.config.data_schema import SandboxConfig
from megatron_grpo.environments.sandbox import kernel
from megatron_grpo.environments.sandbox.sandbox import Sandbox, SandboxUnavailableError, open_sandbox
from tests.support.forked import as_ordinary_user
from tests.support.sandboxed import CONFIG, STRONGEST, filtered, isolated


@isolated
def test_what_keeps_a_program_from_starting_is_told() -> None:
    with pytest.raises(SandboxUnavailableError, match=r"the program was not run: .*Read-only file system"):
        Sandbox(CONFIG, STRONGEST).run(["/bin/true"], {"../outside.txt": ""})


def test_less_than_what_is_required_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_grpo.environments.sandbox.sandbox._find_problem", _only_limits)
    assert open_sandbox(SandboxConfig(required="limits")).level == "limits"
    for required in ("namespaces", "filtered"):
        with pytest.raises(SandboxUnavailableError) as refused:
            open_sandbox(SandboxConfig(required=required))
        assert f"sandbox.required={required} is not possible on this machine: unshare" in str(refused.value)
        assert "allow user namespaces" in str(refused.value)
        assert "or accept less with sandbox.required=" in str(refused.value)


def test_a_machine_without_the_filter_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "cannot run python3: libseccomp.so.2: cannot open shared object file: No such file or directory"
    monkeypatch.setattr("megatron_grpo.environments.sandbox.sandbox._find_problem", lambda sandbox: message)
    with pytest.raises(SandboxUnavailableError, match="No such file or directory; install libseccomp"):
        open_sandbox(SandboxConfig())


def _only_limits(sandbox: Sandbox) -> str | None:
    return None if sandbox.level == "limits" else "unshare: Operation not permitted"


@pytest.mark.skipif(shutil.which("unshare") is None, reason="util-linux's unshare makes the machine that refuses")
@isolated
def test_a_machine_without_namespaces_really_refuses() -> None:
    """In a user namespace that may have no further ones, as in a container that forbids them."""
    code = (
        "from megatron_grpo.environments.sandbox.sandbox import open_sandbox\n"
        "from megatron_grpo.config.data_schema import SandboxConfig\n"
        "print(open_sandbox(SandboxConfig(required='limits')).level)\n"
        "open_sandbox(SandboxConfig())\n"
    )
    inner = f'echo 0 > /proc/sys/user/max_user_namespaces; exec setpriv --bounding-set=-all {sys.executable} -c "$CODE"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", inner]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4]), "CODE": code}
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.stdout == "limits\n", process.stderr
    assert "SandboxUnavailableError: sandbox.required=filtered is not possible on this machine: " in process.stderr


@filtered
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="no Python that every user may run")
def test_a_machine_whose_namespaces_give_no_rights_really_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As AppArmor on Ubuntu 24.04 does to an ordinary user: a user namespace can be made, but mounts nothing."""
    if not os.access(Path(__file__).parents[4], os.X_OK | os.R_OK):
        pytest.skip("the checkout is readable for its owner only")
    monkeypatch.setattr(kernel, "_RULES", (("mount", errno.EACCES, ()),))

    def outcome() -> tuple[str, bool, str]:
        kernel.forbid_new_rights()
        kernel.filter_system_calls(has_cgroup=True)
        allowed = open_sandbox(SandboxConfig(required="limits"), "/usr/bin/python3")
        ran = allowed.run_python("print(1)").succeeded
        try:
            open_sandbox(SandboxConfig(required="namespaces"), "/usr/bin/python3")
        except SandboxUnavailableError as error:
            return allowed.level, ran, str(error)
        return allowed.level, ran, ""

    level, ran, refused = as_ordinary_user(outcome)
    assert (level, ran) == ("limits", True)
    assert "sandbox.required=namespaces is not possible on this machine: " in refused
    assert "Permission denied" in refused
    assert "kernel.apparmor_restrict_unprivileged_userns" in refused
