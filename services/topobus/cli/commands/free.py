"""`topobus free`: what is free in any cluster, of any DRA driver, and how many more of a pod fit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter

from topobus.cli.cluster_questions import SNAPSHOT_DEFAULTS, SnapshotOptions, ask, read_one
from topobus.cli.exits import ExitCode
from topobus.cli.render.free_table import free_view
from topobus.cli.render.output import Output, TextOrJson
from topobus.values.cluster_answers import FreeAnswer

__all__ = ["free"]

_BY = ("driver", "kind", "model")


def free(
    *,
    by: Annotated[
        tuple[Literal["driver", "kind", "model", "class", "node", "numa"], ...],
        Parameter(help="Tell rows apart by this, one or several. Default: driver, kind and model."),
    ] = (),
    wanted: Annotated[
        Path | None,
        Parameter(
            name="--for", help="A manifest of a pod, a claim or a claim template: how many more of it fit, and where."
        ),
    ] = None,
    output: TextOrJson = "text",
    options: SnapshotOptions = SNAPSHOT_DEFAULTS,
) -> int:
    """List the free devices of any cluster, how many of them lie together, and how many more of a pod
    fit.

    It reads and writes nothing, needs nothing in the cluster, and knows any DRA driver.
    """
    out = Output(is_json=output == "json")
    objects = read_one("count", wanted, out.note) if wanted is not None else []
    chosen = tuple(dict.fromkeys(by)) or _BY
    arguments = ["free", *options.arguments()]
    arguments += [word for name in chosen for word in ("--by", name)] + (["--for"] if objects else [])
    answer = msgspec.convert(ask(arguments, out, objects), FreeAnswer)
    out.document(answer)
    out.show(free_view(answer, chosen))
    return ExitCode.OK if wanted is None or any(fit.count for fit in answer.fits) else ExitCode.NO
