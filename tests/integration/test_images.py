"""Both images are built from their files, and three steps of the quickstart run in the one for CPUs, offline.

buildah builds them, which needs no service. The bases that the files name are stand-ins: Debian 12 from its packages,
with a copy of the Python that runs this test. So the images of python.org and NVIDIA, Ubuntu's Python, the variables of
NVIDIA's base, the driver's mounts, pyxis and enroot are not shown.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILES = {name: ROOT / "docker" / f"Dockerfile.{name}" for name in ("cpu", "cuda")}
BASE = re.compile(r"^(?:FROM|ARG BASE=) ?([\w./:-]+)$", re.MULTILINE)
TOOLS = ("buildah", "debootstrap", "unshare", "ip")
LIBRARIES = "bzip2,ca-certificates,libffi8,libncursesw6,libreadline8,libsqlite3-0,libssl3,libuuid1,xz-utils,zlib1g"
"""Debian's packages that a Python from another place loads."""
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
FREE_GB = 30
"""The image for CPUs has up to 8 GB, of which three copies exist while it is written; the build for GPUs takes 12."""
STOPPED = 42
"""Exit status of a build that has passed all steps of its file."""


def find_obstacle() -> str | None:
    """Find the reason why images cannot be built here."""
    if os.geteuid() != 0:
        return "building an image without Docker needs root"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not installed"
    if sys.base_prefix == "/usr":
        return "the Python that runs this test cannot be copied out of /usr"
    free = shutil.disk_usage("/var/tmp").free / 1e9
    return f"{free:.0f} GB of disk are free, and images need {FREE_GB}" if free < FREE_GB else None


OBSTACLE = find_obstacle()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(5400),
    pytest.mark.skipif(OBSTACLE is not None, reason=f"no images can be built: {OBSTACLE}"),
]


class Images:
    """Images and containers of this test, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folders = ["--root", str(folder / "images"), "--runroot", str(folder / "containers")]
        self.buildah = ["buildah", "--storage-driver", "overlay", *folders]

    def call(self, *arguments: object, offline: bool = False, status: int = 0) -> str:
        """Call buildah, without a network except loopback if `offline`; returns what it prints."""
        command = [*self.buildah, *map(str, arguments)]
        if offline:
            command = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
        process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        assert process.returncode == status, f"{command}: exit status {process.returncode}\n{process.stdout[-6000:]}"
        return process.stdout

    def build(self, file: Path, *options: str, status: int = 0) -> str:
        """Build a Dockerfile with this repository; returns what the build prints."""
        host = ["--isolation", "chroot", "--network", "host", "--pull-never"]
        return self.call("bud", *host, *options, "--file", file, ROOT, status=status)

    def make_base(self) -> None:
        """Make the stand-in, under the name of each Dockerfile's base."""
        root = self.folder / "root"
        debootstrap = ["debootstrap", "--variant=minbase", f"--include={LIBRARIES}", "bookworm", str(root)]
        subprocess.run(debootstrap, check=True, stdout=subprocess.DEVNULL)
        for part in ("bin", "include", "lib"):
            shutil.copytree(Path(sys.base_prefix) / part, root / "usr/local" / part, symlinks=True, dirs_exist_ok=True)
        shutil.copy(CERTIFICATES, root / CERTIFICATES[1:])  # those by which this machine reaches an index
        subprocess.run(["chroot", str(root), "ldconfig"], check=True)
        container = self.call("from", "scratch").strip()
        self.call("copy", "--quiet", container, root, "/")
        for variable in ("SSL_CERT_FILE", "PIP_CERT"):
            self.call("config", "--env", f"{variable}={CERTIFICATES}", container)
        self.call("config", "--env", "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", container)
        for file in DOCKERFILES.values():
            (name,) = BASE.findall(file.read_text())
            self.call("commit", "--quiet", container, name if "/" in name else f"docker.io/library/{name}")
        self.call("rm", container)
        shutil.rmtree(root)

    def remove(self) -> None:
        """Remove all images and containers, which take gigabytes."""
        self.call("rm", "--all")
        self.call("rmi", "--all", "--force")
        shutil.rmtree(self.folder)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    images = Images(tmp_path_factory.mktemp("images"))
    images.make_base()
    yield images
    images.remove()


@pytest.fixture(scope="module")
def cpu_image(images: Images) -> Iterator[dict[str, Any]]:
    """The configuration of the image for CPUs, which is built and then removed."""
    images.build(DOCKERFILES["cpu"], "--tag", "cpu")
    yield json.loads(images.call("inspect", "--type", "image", "cpu"))["OCIv1"]["config"]
    images.call("rmi", "cpu")


@pytest.mark.parametrize("user", ["10001", "12345"], ids=["the image's user", "a user in no list, with --user"])
def test_the_quickstart_runs_in_the_image_for_cpus(images: Images, cpu_image: dict[str, Any], user: str) -> None:
    container = images.call("from", "--pull-never", "localhost/cpu").strip()
    run = ["run", "--isolation", "chroot", *(["--user", user] if user != cpu_image["User"] else []), container, "--"]
    assert images.call(*run, "id", "--user").strip() == user
    command = [*cpu_image["Entrypoint"], *cpu_image["Cmd"], "grpo.max_num_steps=3"]
    images.call(*run, *command, offline=True)
    metrics = images.call(*run, "cat", "outputs/quickstart/latest/metrics.jsonl")
    assert [json.loads(line)["step"] for line in metrics.splitlines()] == [1, 2, 3]
    images.call("rm", container)


def test_the_image_for_gpus_passes_its_import_check(images: Images) -> None:
    text = DOCKERFILES["cuda"].read_text()
    assert "import megatron.core, modelopt, transformer_engine.pytorch, transformer_engine_torch, vllm" in text
    # The last step, as the image's user, ends the build before 10 GB are written a second and a third time.
    file = images.folder / "Dockerfile.stopped"
    file.write_text(f"{text}\nRUN id --user && python -m megatron_grpo.train --version && exit {STOPPED}\n")
    output = images.build(
        file, "--build-arg", "BUILD=quick", "--build-arg", "BUILD_JOBS=2", "--build-arg", "KERNELS=", status=STOPPED
    )
    user, version = output.partition(f"&& exit {STOPPED}")[2].split("\n")[1:3]
    assert user == "10001"
    assert version.startswith("megatron_grpo ")
