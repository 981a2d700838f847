"""Validates device classes: writes into each class whether its expressions compile, so that a
mistake shows before a claim uses the class.

A class is written only when its condition changes.
"""

from __future__ import annotations

from functools import partial

from topobus.controller.state.standalone_state import StandaloneState
from topobus.controller.store.nats_store import NatsStore
from topobus.engine.cel.seam import SelectorCompiler, SelectorError
from topobus.engine.claims import lifecycle
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.kubernetes import limits
from topobus.formats.kubernetes.objects import name_of
from topobus.formats.kubernetes.resource import DeviceClassSpec
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.messages import ApiObject
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.process.work_queue import Done, WorkQueue
from topobus.values.errors import ContractError
from topobus.values.timestamps import rfc3339

__all__ = ["VALID", "ClassReconciler", "validate"]

VALID = "Valid"
"""The condition of a DeviceClass. Kubernetes has none, as its API server refuses such a class."""


class ClassReconciler:
    """Validates classes, each revision once."""

    def __init__(self, runtime: Runtime, state: StandaloneState, compiler: SelectorCompiler, queue: WorkQueue) -> None:
        self._runtime = runtime
        self._state = state
        self._store = NatsStore(runtime.bus, state)
        self._compiler = compiler
        self._queue = queue

    async def reconcile_all(self) -> None:
        """Validate every new or changed class."""
        classes = dict(self._state.of_kind("deviceclass"))
        for key, stored in classes.items():
            await self._queue.run(key, stored.revision, partial(self._validate_class, key, stored), name=stored.shown)
        self._queue.keep(classes.keys())

    async def _validate_class(self, key: ObjectKey, stored: Stored) -> Done:
        """Validate one class and write the result into its status."""
        reason, message = validate(stored.value, self._compiler)
        now = rfc3339(self._runtime.clock.now())
        api_object = lifecycle.with_condition(
            stored.value, is_true=reason == VALID, reason=reason, message=message, now=now, kind=VALID
        )
        written = await self._store.write(key, stored.revision, api_object) if api_object is not stored.value else None
        if written is None:
            return Done(stored.revision)
        get_logger().info("class.judged", device_class=key.name, reason=reason, why=message)
        return Done(written.revision)


def validate(api_object: ApiObject, compiler: SelectorCompiler) -> tuple[str, str]:
    """Return a condition's reason and message: `Valid`, `Malformed` for a spec that cannot be
    parsed, `Invalid` for an expression that does not compile.
    """
    try:
        spec = read_as(api_object.spec, DeviceClassSpec, where=name_of(api_object))
    except ContractError as err:
        return "Malformed", err.message
    problems = [str(problem) for problem in limits.check_class(spec)]
    if problems:
        return "Malformed", "; ".join(problems)
    wrong = []
    for number, selector in enumerate(spec.selectors):
        compiled = compiler.compile(selector.cel.expression) if selector.cel is not None else None
        selector_error = compiled if isinstance(compiled, SelectorError) or compiled is None else compiled.objection
        if selector_error is not None:
            where = f" (line {selector_error.line}, column {selector_error.column})" if selector_error.line else ""
            wrong.append(f"spec.selectors[{number}].cel.expression: {selector_error.message}{where}")
    return ("Invalid", "; ".join(wrong)) if wrong else (VALID, f"{len(spec.selectors)} selectors compile")
