"""Console scripts `kubectl-topobus` and `kubectl_complete-topobus`: kubectl finds both on PATH, and
`kubectl topobus …` is `topobus …`.

kubectl passes the words after the plugin's name. Its own flags (`-n`, `--context`) it neither reads
nor passes on before that name, and after it they are ours.

Source: kubernetes.io/docs/tasks/extend-kubectl/kubectl-plugins; completion of plugins came with
kubectl 1.26.
"""

import sys

from topobus.cli.help.quick import COMPLETE, answer_quickly
from topobus.cli.main import main
from topobus.process.packages import needing_extra

__all__ = ["complete_main", "main"]


def complete_main() -> None:
    """Answer a shell that completes `kubectl topobus …`: kubectl passes the words, the last one
    unfinished.
    """
    with needing_extra("cli", program="kubectl_complete-topobus", more="'topobus[all]' for the whole system"):
        answer_quickly([COMPLETE, *sys.argv[1:]])


if __name__ == "__main__":
    main()
