"""`topobus completion`: the script by which a shell completes commands, options, and names of
running things.
"""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from cyclopts import Parameter

from topobus.cli.exits import ExitCode

__all__ = ["completion"]

_BASH = r"""# bash completion of topobus. Now: source <(topobus completion bash). For good: the same line in ~/.bashrc.
_topobus() {
    local line directive=4
    COMPREPLY=()
    while IFS= read -r line; do
        case $line in
            :*) directive=${line#:} ;;
            *) COMPREPLY+=("${line%%$'\t'*}") ;;
        esac
    done < <("${COMP_WORDS[0]}" __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    if [[ $directive == 0 && ${#COMPREPLY[@]} == 0 ]]; then
        compopt -o default 2>/dev/null
    fi
}
complete -F _topobus topobus
"""

_ZSH = r"""#compdef topobus
# zsh completion of topobus. Now: source <(topobus completion zsh). For good: write this into a file _topobus in a folder of $fpath.
_topobus() {
    local line directive=4 value
    local -a values
    while IFS= read -r line; do
        case $line in
            :*) directive=${line#:} ;;
            *) value=${line%%$'\t'*}; values+=("${value//:/\\:}${${line#$value}/$'\t'/:}") ;;
        esac
    done < <($words[1] __complete "${(@)words[2,CURRENT]}" 2>/dev/null)
    if (( $#values )); then
        _describe topobus values
    elif [[ $directive == 0 ]]; then
        _files
    fi
}
if [[ $funcstack[1] == _topobus ]]; then
    _topobus "$@"
elif (( $+functions[compdef] )); then
    compdef _topobus topobus
fi
"""  # noqa: E501

_FISH = r"""# fish completion of topobus. Now: topobus completion fish | source. For good: write this into ~/.config/fish/completions/topobus.fish.
function __topobus_complete
    set -l words (commandline -opc)
    set -l lines ($words[1] __complete $words[2..-1] (commandline -ct) 2>/dev/null)
    if test (count $lines) -eq 1; and test "$lines[1]" = :0
        __fish_complete_path (commandline -ct)
    else
        string match -v -r '^:' -- $lines
    end
end
complete -c topobus -f -a '(__topobus_complete)'
"""  # noqa: E501

_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="The shell that will read it.")], /
) -> int:
    """Print the script by which a shell completes commands, options and names."""
    sys.stdout.write(_SCRIPTS[shell])
    return ExitCode.OK
