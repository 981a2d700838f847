"""Decides what `--probe` answers, before the process imports anything of its service.

A health check starts a process for each service every few seconds. With the service's imports one
check costs 280 to 480 ms of processor time, which is many times what the service itself uses. The
interpreter alone costs 9 ms. So this module imports only what every interpreter has loaded already
(`os`, `sys`) and `_socket`, which is a quarter of `socket` (that one brings enum and selectors).

It prints the report of /readyz, and exits with status 0 (ready) or 1. It reads `http.host` and
`http.port` and no other setting, from the arguments, the environment and the file of `--config`, by
the rules of `process.config`. Where those two need more than that (a mistake, a form it does not
know) it leaves the answer to `process.service.run`, which names the mistake. The service itself and
`--check-config` report a mistake in another setting.
"""

import sys
from _socket import AF_INET, AF_INET6, SOCK_STREAM, socket
from os import environ

__all__ = ["answer_probe", "ask_ready", "read_endpoint"]

# Of `process.config.HttpSettings`; a test holds them together.
_DEFAULT_HOST = "127.0.0.1"
_DEFAULT_PORT = 0
# A client on the same machine: a service that listens at every address is asked at loopback.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
# Of each step. The health check of compose.yaml ends the process after 5 s.
_TIMEOUT_S = 2.0
# A report has some hundred bytes. Another program at the port must not fill the memory.
_MOST_BYTES = 1 << 20


def answer_probe(service: str) -> None:
    """Answer `--probe` and end the process. Return when the arguments request something else.

    Returns also where the two settings cannot be read here.

    Errors: raises SystemExit with 0 or 1 when it answered.
    Cost: 3 ms of processor time besides the interpreter's 9; a TOML reader's 10 more with --config.
    """
    if "--probe" not in sys.argv:
        return
    endpoint = read_endpoint(service, sys.argv[1:], dict(environ))
    if endpoint is None:
        return
    is_ready, report = ask_ready(*endpoint)
    sys.stdout.write(f"{report.strip()}\n")
    sys.exit(0 if is_ready else 1)


def read_endpoint(service: str, arguments: list[str], variables: dict[str, str]) -> tuple[str, int] | None:
    """Read where the service listens: the file, then TOPOBUS_ALL__*, then the service's own
    variables.

    The last one wins.

    Shapes: result — host and port, or None where `process.config` must read (and report mistakes),
    or where the arguments request more than a probe.
    """
    file = ""
    words = iter(arguments)
    for word in words:
        if word == "--config":
            file = next(words, "")
        elif word.startswith("--config="):
            file = word.removeprefix("--config=")
        elif word != "--probe":
            return None
        if word != "--probe" and not file:
            return None
    settings: dict[str, object] = {"host": _DEFAULT_HOST, "port": _DEFAULT_PORT}
    if file:
        written = _read_file(file)
        if written is None:
            return None
        settings |= written
    for prefix in ("TOPOBUS_ALL__", f"TOPOBUS_{service.upper().replace('-', '_')}__"):
        for variable in sorted(variables):
            section, _, key = variable.removeprefix(prefix).lower().partition("__")
            if not variable.startswith(prefix) or section != "http":
                continue
            text = variables[variable]
            if key == "port" and text.isascii() and text.isdigit():
                settings["port"] = int(text)
            elif key == "host":
                settings["host"] = text
            elif key not in ("stalled_s", "stuck_s"):
                return None
    host, port = settings["host"], settings["port"]
    # bool is an int for Python, not for TOML.
    if not isinstance(host, str) or type(port) is not int or not 0 <= port <= 65535:
        return None
    return host, port


def ask_ready(host: str, port: int) -> tuple[bool, str]:
    """Ask /readyz of the service on this machine that listens at `host` and `port`.

    Shapes: result — whether it is ready, and its report or why there is none.
    Errors: raises nothing; a refused connection, silence and an answer
    that is no HTTP are "not ready".
    """
    if port == 0:
        return False, "http.port is 0: there is no endpoint to ask; set TOPOBUS_ALL__HTTP__PORT"
    host = _LOOPBACK.get(host, host)
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}/readyz"
    try:
        connection = socket(AF_INET6 if ":" in host else AF_INET, SOCK_STREAM, 0)
        try:
            connection.settimeout(_TIMEOUT_S)
            connection.connect((host, port))
            # HTTP/1.0: the other end closes after its answer, so
            # reading ends where the answer does.
            connection.sendall(f"GET /readyz HTTP/1.0\r\nHost: {shown}:{port}\r\n\r\n".encode())
            answer = b""
            while len(answer) < _MOST_BYTES and (part := connection.recv(65536)):
                answer += part
        finally:
            connection.close()
    except (OSError, ValueError) as err:
        return False, f"no answer at {url}: {err}"
    head, _, body = answer.partition(b"\r\n\r\n")
    words = head.split(maxsplit=2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/"):
        return False, f"no answer at {url}: got {answer[:40]!r}, wanted an HTTP status line"
    return words[1] == b"200", body.decode("utf-8", "replace")


def _read_file(file: str) -> dict[str, object] | None:
    """Read the file's `[http]` section. None when it cannot be read."""
    # Only here: it costs as much as half the interpreter.
    import tomllib

    try:
        with open(file, "rb") as text:  # noqa: PTH123 - pathlib costs more than the rest of the probe
            section = tomllib.load(text).get("http", {})
    except (OSError, ValueError):
        return None
    return {key: section[key] for key in ("host", "port") if key in section} if isinstance(section, dict) else None
