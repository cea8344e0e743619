"""`kvtools completion`: what lets a shell complete commands, options and names."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from kvtools.cli.command_tree import Command, Option, command_tree
from kvtools.cli.layout import shown
from kvtools.cli.options import Source
from kvtools.errors import KvtoolsError, UsageError

SHELLS = ("bash", "zsh", "fish")


def run(
    shell: Annotated[
        str, typer.Argument(metavar="|".join(SHELLS), help="The shell that is to complete what is typed.")
    ],
    path: Annotated[str | None, typer.Argument(hidden=True)] = None,
) -> None:
    """Print a script that lets a shell complete commands, options, dialects and the tables of PATH.

    The script knows commands and options by itself: print it anew after an update. For the names of tables it asks
    `kvtools`, which reads the index of a local PATH, and nothing behind a URL.

    \b
    Examples:
      kvtools completion bash > ~/.local/share/bash-completion/completions/kvtools
      kvtools completion zsh > ~/.zfunc/_kvtools        # with fpath+=~/.zfunc before compinit in ~/.zshrc
      kvtools completion fish > ~/.config/fish/completions/kvtools.fish
    """
    if shell == "tables" and path is not None:
        _print_tables(path)
        return
    if shell not in SHELLS or path is not None:
        raise UsageError(f"completing: got {shell}, expected one of {', '.join(SHELLS)}")
    top, commands = command_tree()
    script = {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]
    sys.stdout.write(script(top, list(commands.values())))


def _print_tables(path: str) -> None:
    """Print the names of a checkpoint's tables, a line each; nothing where that takes a network, or goes wrong."""
    if "://" in path:
        return
    with contextlib.suppress(KvtoolsError, OSError, MemoryError):
        for name in Source().open(path, lenient=True).tables:
            if shown(name) == name:
                print(name)


def _first_words(command: Command, commands: Sequence[Command]) -> str:
    """Return what the first argument of a command may be, where that is one of some words: those of its metavar, or
    the names of commands."""
    metavar = command.arguments[0][0] if command.arguments else ""
    if metavar == "[COMMAND]":
        return " ".join(one.name for one in commands)
    return metavar.replace("|", " ") if "|" in metavar else ""


def _words(options: Sequence[Option]) -> str:
    return " ".join(name for option in options for name in option.names)


_BASH = r"""# bash completion of kvtools; made by `kvtools completion bash`

_kvtools_path() {
  # The first word behind the command that is no option: PATH, for whoever asks for its tables.
  local word
  for word in "${COMP_WORDS[@]:2:COMP_CWORD-2}"; do
    case "$word" in
      -*) ;;
      *) if [ -e "$word" ] || [ -e "$word.index" ]; then printf '%%s\n' "$word"; return; fi ;;
    esac
  done
}

_kvtools() {
  local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" command="" word skip=""
  local commands="%(commands)s" options="" values="" files=yes
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    if [ -n "$skip" ]; then skip=""; continue; fi
    case "$word" in --color) skip=yes ;; -*) ;; *) command="$word"; break ;; esac
  done
  COMPREPLY=()
  case "$command" in
    "") options="$commands %(top)s"; files="" ;;
%(cases)s
  esac
  case "$command $before" in
    *' --color') values="auto always never"; files="" ;;
%(values)s
  esac
  if [ "$values" = "@tables" ]; then
    values="$(kvtools completion tables "$(_kvtools_path)" 2>/dev/null)"
    local IFS=$'\n'
    COMPREPLY=($(compgen -W "$values" -- "$current"))
  elif [ -n "$values" ]; then
    COMPREPLY=($(compgen -W "$values" -- "$current"))
  elif [ -z "$files" ] && [ -n "$command" ]; then
    :
  elif [ "${current:0:1}" = "-" ] || [ -z "$command" ]; then
    COMPREPLY=($(compgen -W "$options" -- "$current"))
  else
    compopt -o filenames 2>/dev/null
    local IFS=$'\n'
    COMPREPLY=($(compgen -f -- "$current"))
  fi
}

complete -F _kvtools kvtools
"""


def _bash(top: Command, commands: Sequence[Command]) -> str:
    cases, values = [], []
    for command in commands:
        cases.append(f'    {command.name}) options="{_words(command.options)}" ;;')
        for option in command.options:
            said = "@tables" if option.is_table else " ".join(option.values)
            if option.metavar is not None and (said or not option.is_file) and "--color" not in option.names:
                pattern = "|".join(f"'{command.name} {name}'" for name in option.names)
                values.append(f'    {pattern}) values="{said}"; files="" ;;')
        if words := _first_words(command, commands):
            values.append(f'    \'{command.name} {command.name}\') values="{words}"; files="" ;;')
    return _BASH % {
        "commands": " ".join(command.name for command in commands),
        "top": _words(top.options),
        "cases": "\n".join(cases),
        "values": "\n".join(values),
    }


def _zsh_text(text: str) -> str:
    return text.replace("'", "'\\''").replace("[", "\\[").replace("]", "\\]").replace(":", "\\:").replace("`", "")


_ZSH = r"""#compdef kvtools
# zsh completion of kvtools; made by `kvtools completion zsh`

_kvtools_tables() {
  local word place
  for word in ${words[2,-1]}; do
    if [[ $word != -* && ( -e $word || -e $word.index ) ]]; then place=$word; break; fi
  done
  [[ -n $place ]] && compadd -- ${(f)"$(kvtools completion tables $place 2>/dev/null)"}
}

_kvtools() {
  local context state line
  local -a commands
  commands=(
%(commands)s
  )
  _arguments -C %(top)s '1:command:->command' '*::argument:->rest'
  case $state in
    command) _describe -t commands command commands ;;
    rest)
      case $words[1] in
%(cases)s
      esac ;;
  esac
}

if [ "$funcstack[1]" = "_kvtools" ]; then _kvtools "$@"; else compdef _kvtools kvtools; fi
"""


def _zsh_option(option: Option) -> str:
    help_text = _zsh_text(" ".join(option.help.split()))
    action = ""
    if option.metavar is not None:
        what = _zsh_text(option.metavar)
        if option.is_table:
            action = f":{what}:_kvtools_tables"
        elif option.values:
            action = f":{what}:({' '.join(option.values)})"
        else:
            action = f":{what}:{'_files' if option.is_file else ' '}"
    return " ".join(f"'*{name}[{help_text}]{action}'" for name in option.names)


def _zsh(top: Command, commands: Sequence[Command]) -> str:
    cases = []
    for command in commands:
        options = " ".join(_zsh_option(option) for option in command.options)
        first = command.arguments[0][0] if command.arguments else ""
        words = _first_words(command, commands)
        places = f"'1:{_zsh_text(first)}:({words})'" if words else "'*:file:_files'"
        cases.append(f"        {command.name}) _arguments -s {options} {places} ;;")
    return _ZSH % {
        "commands": "\n".join(f"    '{command.name}:{_zsh_text(command.summary)}'" for command in commands),
        "top": " ".join(_zsh_option(option) for option in top.options),
        "cases": "\n".join(cases),
    }


def _fish_text(text: str) -> str:
    return "'" + " ".join(text.split()).replace("\\", "\\\\").replace("'", "\\'") + "'"


_FISH = r"""# fish completion of kvtools; made by `kvtools completion fish`

function __kvtools_tables
    for word in (commandline -opc)[3..-1]
        if not string match -q -- '-*' $word; and test -e $word -o -e $word.index
            kvtools completion tables $word 2>/dev/null
            return
        end
    end
end

"""


def _fish(top: Command, commands: Sequence[Command]) -> str:
    lines = [_fish_option("__fish_use_subcommand", option) for option in top.options]
    for command in commands:
        about = _fish_text(command.summary)
        lines.append(f"complete -c kvtools -n __fish_use_subcommand -f -a {command.name} -d {about}")
        seen = f"'__fish_seen_subcommand_from {command.name}'"
        lines += [_fish_option(seen, option) for option in command.options]
        if words := _first_words(command, commands):
            lines.append(f"complete -c kvtools -n {seen} -f -a '{words}'")
    return _FISH + "\n".join(lines) + "\n"


def _fish_option(condition: str, option: Option) -> str:
    names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
    more = ""
    if option.metavar is not None:
        if option.is_table:
            more = " -x -a '(__kvtools_tables)'"
        elif option.values:
            more = f" -x -a '{' '.join(option.values)}'"
        else:
            more = " -r" if option.is_file else " -x"
    return f"complete -c kvtools -n {condition} {names}{more} -d {_fish_text(option.help)}"
