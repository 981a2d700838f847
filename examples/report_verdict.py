"""Report with nats-py how a device is, as an exporter of your own does:
docs/how-to/take-in-others-verdicts.md.
"""

import asyncio
import json
import sys

import nats


async def report(url: str, node: str, device_class: str, **verdict: str) -> dict:
    # The answer comes from the service of the class, which may publish there alone.
    nc = await nats.connect(url, inbox_prefix=f"_INBOX.verdicts.{device_class}", allow_reconnect=False)
    subject = f"topobus.v1.report.{node.replace('.', '_')}.{device_class}"
    answer = await nc.request(subject, json.dumps({"verdict": verdict}).encode(), timeout=5)
    await nc.close()
    if why := (answer.headers or {}).get("Topobus-Error-Message"):
        raise ValueError(why)
    return json.loads(answer.data)["result"]


if __name__ == "__main__":
    if len(sys.argv) < 4 or not all("=" in argument for argument in sys.argv[4:]):
        sys.exit("usage: report_verdict.py nats://verdicts:PASSWORD@HOST:4222 NODE CLASS source=S state=unhealthy …")
    try:
        result = asyncio.run(report(*sys.argv[1:4], **dict(argument.split("=", 1) for argument in sys.argv[4:])))
    except (OSError, ValueError, TimeoutError, nats.errors.Error) as err:
        sys.exit(f"report_verdict.py: {str(err) or type(err).__name__}")
    print(json.dumps(result))
    sys.exit(0 if result["outcome"] == "taken" else 1)
