"""Reports a missing extra: which package is not installed and which extra brings it, in place of a
traceback. Also hides an optional package while a library that would load it is imported.

All console scripts are installed always, because they are entry points of one wheel. Their
dependencies come with the extras. This module imports nothing outside the standard library, because
it runs before any dependency is known to be there.
"""

import sys

__all__ = ["hiding", "needing_extra"]

# sysexits.h EX_CONFIG, as for a setting that cannot be used.
_EXIT_CONFIG = 78


class needing_extra:  # noqa: N801 - reads as the function that it is for its callers; contextlib would cost 4 ms
    """Import a service's modules inside the block.

    Ends the process with a text on what to install when a third-party package is absent.

    Shapes: service — the name of the extra; program — the console script where that is not
    `topobus-<service>`; more — another extra that would do.
    Errors: raises SystemExit(78) in place of a ModuleNotFoundError. A missing module of our own is
    our bug and passes.
    """

    def __init__(self, service: str, *, program: str = "", more: str = "") -> None:
        self._service = service
        self._program = program or f"topobus-{service}"
        self._more = more

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, err: BaseException | None, _trace: object) -> None:
        if not isinstance(err, ModuleNotFoundError):
            return
        name = (err.name or "").partition(".")[0]
        if name == "topobus":
            return
        also = f", or {self._more}" if self._more else ""
        sys.stderr.write(
            f"error: {self._program} needs {name}, which is not installed\n  next: pip install "
            f"'.[{self._service}]' from the checkout{also}\n"
        )
        sys.exit(_EXIT_CONFIG)


class hiding:  # noqa: N801 - as above
    """Import inside the block a library that uses another package only where it is installed: here
    it does without.

    Shapes: package — a top-level name. Afterwards it can be imported as before.
    """

    def __init__(self, package: str) -> None:
        self._package = package

    def __enter__(self) -> None:
        self._modules = {
            name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == self._package
        }
        sys.modules[self._package] = None  # type: ignore[assignment]  # what the import system itself takes for "not to be had"

    def __exit__(self, *_: object) -> None:
        del sys.modules[self._package]
        sys.modules.update(self._modules)
