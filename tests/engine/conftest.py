"""The engine and its two local images, once for all tests that need them; a containerd of its own for each that runs containers without Docker."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.containerd import Containerd, provide_containerd
from engine.engine import EngineUnavailable, base_image, lay_certificates, nats_image, provide_engine


@dataclass(frozen=True)
class Images:
    """Names of the images that stand in for a registry's."""

    base: str
    nats: str


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    """A Docker daemon that answers, and the images; a daemon that was started here is stopped at the end."""
    trouble = ""
    with ExitStack() as undo:
        try:
            scratch = tmp_path_factory.mktemp("engine")
            daemon = provide_engine(scratch / "dockerd.log")
            if daemon is not None:
                undo.callback(daemon.wait, 60)
                undo.callback(daemon.terminate)
            certificate = lay_certificates()
            if certificate is not None:
                undo.callback(certificate.unlink, missing_ok=True)
            base = base_image(scratch)
            found_images = Images(base=base, nats=nats_image(base, scratch))
        except EngineUnavailable as err:
            trouble = str(err)
        if trouble:
            # Outside of the handler: what the engine said stands once in the report, without our own frames.
            pytest.fail(trouble, pytrace=False)
        yield found_images


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name, for sockets lie in it."""
    made = Path(tempfile.mkdtemp(prefix="tc-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def containerd(folder: Path) -> Iterator[Containerd]:
    """A containerd that reads the gateway's CDI folder, and whose plugin the gateway may be."""
    if os.geteuid() != 0:
        pytest.fail("only root can run containers here", pytrace=False)
    trouble = ""
    try:
        with provide_containerd(folder / "c", folder / "cdi") as made:
            yield made
    except EngineUnavailable as err:
        trouble = str(err)
    if trouble:
        pytest.fail(trouble, pytrace=False)
