"""Starts, adopts, watches and ends the MPS control daemons of one node. Each act is written down
before it is done.

A daemon that ended is started again at once, and then after pauses that grow. Faults of running
daemons are observations of their GPUs. After a crash of this service `look` adopts daemons that run
and continues to end those that were being ended. A daemon that was being started is left to the
journal, whose undoing ends it (`end`). All methods block, and may be called from several threads.
Each daemon has its own lock, so that no call waits for another daemon.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import structs

from topobus.gpu.config import MpsSettings
from topobus.gpu.mps import commands
from topobus.gpu.mps.daemon_processes import control_of, end_folder, find_processes, is_alive, wait_gone
from topobus.gpu.mps.daemon_state import DaemonFolder, DaemonState, SharedGpu, with_mode
from topobus.process.logging import get_logger
from topobus.sysfs.boot import read_boot_id
from topobus.sysfs.tree import Tree
from topobus.values.errors import HardwareError
from topobus.values.health import HealthState, Observation
from topobus.values.health_reasons import sign
from topobus.values.outcome import Refusal, refuse

__all__ = ["MpsDaemons"]

_LOOK_S = 0.02
# Whole seconds that a daemon's servers have to end before they are killed. All its clients have
# ended before, and undoing has `drivers.timeout_s` in all.
_QUIT_S = 1
# Between two restarts of a daemon that ends again and again. The first restart is immediate, the
# next ones after 2, 4, … seconds.
_LONGEST_PAUSE_S = 60.0
# Seconds after `quit` until servers that were asked to end have gone.
_QUIT_SLACK_S = 0.5
# A daemon that lived this long counts as well again: its next end is its first one.
_WELL_S = 10.0
_TRIES_UNTIL_UNHEALTHY = 3
_LOG_TAIL = 400
_SHARED_MEMORY = "/dev/shm"


class _Daemon:
    """One daemon: its folder, its state, and the results of its restarts."""

    def __init__(self, folder: DaemonFolder, state: DaemonState | None) -> None:
        self.folder = folder
        self.state = state
        self.lock = threading.RLock()
        self.observation: Observation | None = None
        """The fault that the daemon ended. It is kept until it is published, even when the daemon
        runs again by then, because the work of its clients is lost."""
        self.is_back = True
        self.tries = 0
        self.up_since_s = 0.0
        self.next_try_s = 0.0


class MpsDaemons:
    """The daemons of one node."""

    def __init__(self, settings: MpsSettings | None = None, *, now: Callable[[], float] = time.monotonic) -> None:
        """Take the operator's settings. Nothing is read before the first call."""
        self.settings = settings or MpsSettings()
        self._now = now
        self._lock = threading.Lock()
        self._daemons: dict[str, _Daemon] | None = None

    @property
    def folder(self) -> Path:
        """The folder of all daemons."""
        return Path(self.settings.state_dir)

    def pipes_of(self, name: str) -> str:
        """Return the folder that the clients of a daemon get mounted."""
        return str(DaemonFolder(self.folder, name).pipes)

    def is_serving(self, wanted: DaemonState) -> bool:
        """Return whether a running daemon already serves what is wanted."""
        state = self._daemon(wanted.name).state
        return (
            state is not None
            and state.is_whole
            and not state.is_ending
            and _is_same(state, wanted)
            and state.limits.raised_to(wanted.limits) == state.limits
            and is_alive(state.pid, state.started)
        )

    def ensure(self, wanted: DaemonState) -> Refusal | None:
        """Start a daemon, or raise the limits of the one that runs, and return None when it serves.

        After a refusal `end` ends what was begun, unless another owner has it.
        """
        daemon = self._daemon(wanted.name)
        with daemon.lock:
            if self.is_serving(wanted):
                return None
            try:
                self._ensure(daemon, wanted)
            except (HardwareError, OSError) as err:
                return self._refuse_start(daemon, wanted, err)
            shutil.rmtree(daemon.folder.failed_logs, ignore_errors=True)
        return None

    def end(self, name: str, owner: str) -> None:
        """End a daemon, and restore the compute modes of its GPUs.

        Nothing is done when there is none, or it belongs to another owner.

        Errors: raises HardwareError for what cannot be undone now; the caller repeats it later.
        """
        daemon = self._daemon(name)
        with daemon.lock:
            if daemon.state is None or daemon.state.owner == owner:
                self._end(daemon)

    def end_stale(self, device: str) -> None:
        """End the daemons of a GPU without an owner: the journal that had them is lost.

        Errors: as `end`.
        """
        for daemon in self._all().values():
            state = daemon.state
            if state is not None and device in [gpu.device for gpu in state.gpus]:
                get_logger().warning("mps.daemon-stale", daemon=state.name, device=device, pid=state.pid)
                with daemon.lock:
                    self._end(daemon)

    def names(self) -> tuple[str, ...]:
        """List the names of the daemons to look at."""
        return tuple(sorted(name for name, daemon in self._all().items() if daemon.state is not None))

    def look(self, name: str) -> None:
        """Check whether a daemon runs, and start it again when it does not and its pause is over.

        Nothing is done while another thread starts or ends it.
        """
        daemon = self._daemon(name)
        if not daemon.lock.acquire(blocking=False):
            return
        try:
            self._look(daemon)
        except (HardwareError, OSError) as err:
            if daemon.state is not None and daemon.state.is_ending:
                get_logger().warning("mps.end-failed", daemon=name, why=str(err), next_step="it is tried again")
            else:
                get_logger().warning(
                    "mps.restart-failed", daemon=name, why=str(err), tries=daemon.tries, log=str(daemon.folder.logs)
                )
                self._note_gone(daemon, str(err))
        finally:
            daemon.lock.release()

    def observations(self) -> Mapping[str, Observation]:
        """Report the GPUs that have lost their daemon, by device. It waits for no daemon's lock."""
        seen: dict[str, Observation] = {}
        for daemon in self._all().values():
            state, observation = daemon.state, daemon.observation
            if state is None or observation is None:
                continue
            seen.update({gpu.device: observation for gpu in state.gpus})
            if daemon.is_back:
                daemon.observation = None
        return seen

    def _all(self) -> dict[str, _Daemon]:
        with self._lock:
            if self._daemons is None:
                folders = [DaemonFolder(self.folder, name) for name in DaemonFolder.names(self.folder)]
                self._daemons = {folder.path.name: _Daemon(folder, _adopted(folder)) for folder in folders}
            return dict(self._daemons)

    def _daemon(self, name: str) -> _Daemon:
        self._all()
        with self._lock:
            assert self._daemons is not None
            return self._daemons.setdefault(name, _Daemon(DaemonFolder(self.folder, name), None))

    def _ensure(self, daemon: _Daemon, wanted: DaemonState) -> None:
        state = daemon.state
        if state is not None and (state.is_ending or not _is_same(state, wanted)):
            # An earlier owner's daemon was left half ended, and the journal has no owner for it.
            self._end(daemon)
            state = None
        # A known daemon gets raised limits and the present programs: the driver may have been
        # replaced meanwhile.
        state = (
            wanted
            if state is None
            else structs.replace(state, limits=state.limits.raised_to(wanted.limits), programs=wanted.programs)
        )
        self._keep(daemon, state)
        if is_alive(state.pid, state.started):
            self._limit(daemon)
        else:
            self._start(daemon)
        self._keep(daemon, structs.replace(self._state(daemon), is_whole=True))
        daemon.is_back = True

    def _start(self, daemon: _Daemon) -> None:
        """Start the process, whatever an earlier try has left."""
        deadline_s = self._now() + self.settings.start_s
        folder = daemon.folder
        # A server that outlived its control daemon does not serve a new one.
        end_folder(folder.path)
        folder.make(self._state(daemon).programs)
        folder.clear_pipes()
        if self.settings.shared_memory != _SHARED_MEMORY:
            # kubelet makes this folder of the host for root alone. Clients of any user make files
            # in it, as in every /dev/shm.
            Path(_SHARED_MEMORY).chmod(0o1777)
        for gpu in self._state(daemon).gpus if self.settings.exclusive_process else ():
            self._take_alone(daemon, gpu)
        commands.spawn(folder, self._state(daemon), max(1.0, deadline_s - self._now()))
        self._await_answer(daemon, deadline_s)
        process = control_of(find_processes(folder.path))
        if process is None:
            raise HardwareError(
                "nvidia-cuda-mps-control -d reported that it started, but no such process runs", path=str(folder.logs)
            )
        self._keep(
            daemon,
            structs.replace(
                self._state(daemon), pid=process.pid, started=process.started, boot_id=read_boot_id(Tree())
            ),
        )
        self._limit(daemon)
        daemon.up_since_s = self._now()
        get_logger().info("mps.daemon-started", daemon=self._state(daemon).name, pid=process.pid, log=str(folder.logs))

    def _await_answer(self, daemon: _Daemon, deadline_s: float) -> None:
        while True:
            try:
                commands.ask(
                    daemon.folder, self._state(daemon).programs, "get_server_list", max(1.0, deadline_s - self._now())
                )
            except HardwareError:
                if self._now() >= deadline_s:
                    raise
                time.sleep(_LOOK_S)
            else:
                return

    def _limit(self, daemon: _Daemon) -> None:
        state = self._state(daemon)
        servers = commands.ask(daemon.folder, state.programs, "get_server_list")
        for command in commands.limit_commands(state, servers):
            commands.ask(daemon.folder, state.programs, command)

    def _take_alone(self, daemon: _Daemon, gpu: SharedGpu) -> None:
        """Set a GPU to EXCLUSIVE_PROCESS, after its previous mode is written down."""
        state = self._state(daemon)
        if not gpu.mode_before:
            mode = commands.compute_mode(daemon.folder, state.programs, gpu)
            if mode == commands.EXCLUSIVE:
                return
            self._keep(daemon, with_mode(state, gpu.uuid, mode))
        commands.set_compute_mode(daemon.folder, state.programs, gpu, commands.EXCLUSIVE)

    def _end(self, daemon: _Daemon) -> None:
        folder, state = daemon.folder, daemon.state
        if state is not None:
            self._keep(daemon, state := structs.replace(state, is_ending=True))
            if is_alive(state.pid, state.started):
                try:
                    commands.ask(folder, state.programs, f"quit -t {_QUIT_S}", _QUIT_S + _QUIT_SLACK_S)
                except HardwareError as err:
                    get_logger().warning(
                        "mps.quit-failed", daemon=state.name, why=err.message, next_step="it is killed"
                    )
                    end_folder(folder.path)
        processes = find_processes(folder.path)
        wait_gone(processes, _QUIT_SLACK_S)
        end_folder(folder.path)
        for gpu in state.gpus if state is not None else ():
            if state is not None and gpu.mode_before:
                self._give_back(daemon, state, gpu)
        folder.remove()
        daemon.state, daemon.observation, daemon.tries = None, None, 0
        if state is not None:
            get_logger().info("mps.daemon-ended", daemon=state.name, pid=state.pid)

    def _give_back(self, daemon: _Daemon, state: DaemonState, gpu: SharedGpu) -> None:
        # The links to the driver's libraries may be gone after a crash while they were being
        # removed.
        daemon.folder.make(state.programs)
        try:
            commands.set_compute_mode(daemon.folder, state.programs, gpu, gpu.mode_before)
        except HardwareError:
            try:
                mode = commands.compute_mode(daemon.folder, state.programs, gpu)
            except HardwareError as err:
                # The GPU has left the bus, or waits for a reset. It will have the default mode when
                # it is back, and its pod must not wait for that.
                get_logger().warning(
                    "mps.mode-unknown", device=gpu.device, mode_before=gpu.mode_before, why=err.message
                )
                return
            if mode != gpu.mode_before:
                raise

    def _look(self, daemon: _Daemon) -> None:
        state = daemon.state
        if state is None:
            return
        if state.is_ending:
            self._end(daemon)
            return
        if is_alive(state.pid, state.started):
            daemon.is_back = True
            if daemon.tries and self._now() - daemon.up_since_s >= _WELL_S:
                daemon.tries = 0
            return
        if not state.is_whole:
            return
        if daemon.is_back:
            self._note_gone(daemon, f"its process {state.pid} has ended")
        if self._now() >= daemon.next_try_s:
            daemon.next_try_s = self._now() + min(2.0**daemon.tries, _LONGEST_PAUSE_S)
            daemon.tries += 1
            self._start(daemon)
            daemon.is_back = True

    def _note_gone(self, daemon: _Daemon, why: str) -> None:
        state = daemon.state
        if state is None:
            return
        if daemon.is_back or daemon.observation is None:
            get_logger().warning(
                "mps.daemon-gone", daemon=state.name, pid=state.pid, why=why, log=str(daemon.folder.logs)
            )
        daemon.is_back = False
        is_hopeless = daemon.tries >= _TRIES_UNTIL_UNHEALTHY
        daemon.observation = sign(
            "mps-daemon-gone",
            f"its MPS control daemon ended and is started again: {why}; CUDA programs that were its clients "
            "have lost their work",
            evidence={"pid": str(state.pid), "log": str(daemon.folder.logs / "control.log")},
            state=HealthState.UNHEALTHY if is_hopeless else HealthState.DEGRADED,
        )

    def _refuse_start(self, daemon: _Daemon, wanted: DaemonState, err: Exception) -> Refusal:
        text = (
            err.message
            if isinstance(err, HardwareError)
            else f"{getattr(err, 'filename', '') or daemon.folder.path}: {getattr(err, 'strerror', '') or err}"
        )
        log = ""
        if daemon.folder.logs.is_dir():
            # The daemon's folder is removed with the rest of the try. Its log is kept until a
            # daemon of this GPU starts.
            shutil.rmtree(daemon.folder.failed_logs, ignore_errors=True)
            shutil.copytree(daemon.folder.logs, daemon.folder.failed_logs, dirs_exist_ok=True)
            log = str(daemon.folder.failed_logs / "control.log")
        tail = _tail(daemon.folder.logs / "control.log")
        message = f"the MPS control daemon of {wanted.name} does not start: {text}" + (
            f"; its log {log} ends with: {tail}" if log else ""
        )
        return refuse("mps-start-failed", message, device=wanted.name, log=log)

    def _state(self, daemon: _Daemon) -> DaemonState:
        if daemon.state is None:
            raise HardwareError(f"the MPS control daemon {daemon.folder.path.name} was ended meanwhile")
        return daemon.state

    def _keep(self, daemon: _Daemon, state: DaemonState) -> None:
        if state != daemon.state:
            # The file is written first: a state that could not be written must not count.
            daemon.folder.write(state)
            daemon.state = state


def _is_same(state: DaemonState, wanted: DaemonState) -> bool:
    return state.owner == wanted.owner and [gpu.uuid for gpu in state.gpus] == [gpu.uuid for gpu in wanted.gpus]


def _adopted(folder: DaemonFolder) -> DaemonState | None:
    """Read what an earlier process of this service has written about a daemon.

    A folder without a state was being made or removed, and is removed.
    """
    state = folder.read()
    if state is not None and state.boot_id != read_boot_id(Tree()):
        # It ended with its boot. A process that has its pid by now is another one, even with the
        # same start time.
        state = structs.replace(state, pid=0, started="")
    if state is None:
        end_folder(folder.path)
        folder.remove()
    elif is_alive(state.pid, state.started):
        get_logger().info("mps.daemon-adopted", daemon=state.name, pid=state.pid)
    return state


def _tail(log: Path) -> str:
    try:
        return " ".join(log.read_text(encoding="utf-8", errors="replace").split())[-_LOG_TAIL:] or "nothing"
    except OSError:
        return "nothing"
