"""Names a running `topobus up` for the commands of its user: a context that lasts as long as the
run.

If the folder for contexts cannot be written, the run prints a remark and continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from topobus.bus.connection.endpoint import read_url
from topobus.cli.contexts import Context, ContextFolder, announced_context, name_of_folder
from topobus.cli.exits import UsageError
from topobus.local_system.system import System
from topobus.values.errors import ConfigError

__all__ = ["Announcement", "Use"]


@dataclass(frozen=True, kw_only=True)
class Use:
    """How commands find a system."""

    name: str = ""
    """Its context. Empty: it has none."""
    is_selected: bool = False
    """Commands use it without an option."""
    selected: str = ""
    """The context that commands use without an option. Empty: none."""


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """The context that a `topobus up` will have."""

    wanted: str | None
    state: Path
    is_kept: bool
    """Whether the state folder outlives the run."""

    def __post_init__(self) -> None:
        """Refuse a name that another system has.

        Errors: raises UsageError.
        """
        if self.wanted is not None and ContextFolder().free_name(self.wanted, str(self.state)) != self.wanted:
            raise UsageError(
                f"--context {self.wanted}: another system has this name",
                next_step="choose another, or: topobus context rm NAME",
            )

    @contextmanager
    def made(self, system: System, say: Callable[[str], None]) -> Iterator[Use]:
        """Keep the context for the block, and yield how commands find the system."""
        folder = ContextFolder()
        with ExitStack() as held:
            try:
                with folder.choosing():
                    context = self._context(folder, system)
                    is_selected = held.enter_context(announced_context(folder, context, is_kept=self.is_kept))
                use = Use(name=context.name, is_selected=is_selected, selected=folder.selected())
            except ConfigError as err:
                say(f"this system gets no context: {err.message}")
                if system.has_users:
                    say(
                        "commands find no login by themselves: set TOPOBUS_CLI__NATS__USER=cli "
                        f"TOPOBUS_CLI__NATS__PASSWORD_FILE={system.password_file('cli')}"
                    )
                use = Use()
            yield use

    def _context(self, folder: ContextFolder, system: System) -> Context:
        before = [context.name for context in folder.all() if context.state_dir == str(self.state)]
        usual = name_of_folder(self.state, is_kept=self.is_kept)
        name = self.wanted or (before[0] if before else folder.free_name(usual, str(self.state)))
        for other in before:
            # A system has one name: the one of this run.
            if other != name:
                folder.remove(other)
        # A given server may need a login that the environment names. Its password file works for
        # other commands as well.
        login = system.settings_of("cli")
        return Context(
            name=name,
            nats=read_url(system.nats_url)[1],
            user=login.user,
            password_file=login.password_file,
            tls_ca_file=login.tls_ca_file,
            hosts=system.hosts,
            node=system.node,
            state_dir=str(self.state),
        )
