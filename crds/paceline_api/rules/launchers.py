"""Detection of launchers, such as torchrun, in the command of a container.

A command is a list of words, or a line for a shell. Only a word in command position counts: the
first one, after assignments, after programs that run another program (`exec`, `env`, `nohup`), and
after each `;`, `&&`, `|` or line break of a shell's line. `train.py --launcher srun` starts no
launcher. What only the shell itself knows, such as the value of a variable, counts as no launcher,
so a command that is rejected does start ranks.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Final

LAUNCHERS: Final = (
    *("composer", "deepspeed", "horovodrun", "mpiexec", "mpiexec.hydra", "mpirun", "orterun"),
    *("prterun", "srun", "torchrun"),
)
"""Programs that start ranks of their own, which would train without each other."""
PROGRAM: Final = "paceline"
"""Name of the command line, whose verb `launch` runs a training script unchanged."""
LAUNCH_MODULE: Final = "paceline.train.script.launch"
"""The module that the verb `launch` runs."""
DEPTH_MAX: Final = 8
"""Upper bound on the nesting of shells that is examined."""

_MODULES: Final = (
    *("accelerate.commands.launch", "composer.cli.launcher", "deepspeed"),
    *("deepspeed.launcher.runner", "horovod.runner.launch"),
    *("torch.distributed.launch", "torch.distributed.run"),
)
_LAUNCHING_VERBS: Final = {"accelerate": "launch", "colossalai": "run", "fabric": "run"}
"""Programs with several verbs, by name, and the verb that starts ranks."""
_SHELLS: Final = ("ash", "bash", "dash", "ksh", "sh", "zsh")
_SHELL_WITH_VALUE: Final = ("--rcfile", "--init-file")
_PYTHON_WITH_VALUE: Final = ("-X", "-W", "--check-hash-based-pycs")
_RESERVED: Final = ("!", "{", "do", "elif", "else", "if", "then", "until", "while")
"""Words of a shell after which a command begins."""
_WRAPPERS: Final[dict[str, tuple[tuple[str, ...], int]]] = {
    "catchsegv": ((), 0),
    "command": ((), 0),
    "dumb-init": (("-r", "--rewrite"), 0),
    "env": (("-u", "--unset", "-C", "--chdir"), 0),
    "exec": (("-a",), 0),
    "gosu": ((), 1),
    "ionice": (("-c", "--class", "-n", "--classdata"), 0),
    "nice": (("-n", "--adjustment"), 0),
    "nohup": ((), 0),
    "numactl": (("-C", "-N", "-m", "-i", "-p"), 0),
    "setsid": ((), 0),
    "stdbuf": (("-i", "-o", "-e"), 0),
    "su-exec": ((), 1),
    "sudo": (("-u", "-g"), 0),
    "taskset": ((), 1),
    "time": (("-f", "--format", "-o", "--output"), 0),
    "timeout": (("-k", "--kill-after", "-s", "--signal"), 1),
    "tini": (("-p", "-e"), 0),
}
"""Programs that run another program: their options that take the next word, and how many of their
own arguments come before the other program."""
_CONDA: Final = ("-n", "--name", "-p", "--prefix", "--cwd")
_UV: Final = (
    *("-p", "--python", "-w", "--with", "--with-editable", "--with-requirements", "--extra"),
    *("--group", "--only-group", "--no-group", "--no-extra", "--package", "--project", "-i"),
    *("--env-file", "--index", "--default-index", "--index-url", "--extra-index-url", "-f"),
    *("--find-links", "--directory", "--cache-dir", "--config-file", "--python-platform"),
)
_RUNNERS: Final[dict[str, tuple[str, ...]]] = {
    "conda": _CONDA,
    "hatch": ("-e", "--env", "-p", "--project"),
    "mamba": _CONDA,
    "micromamba": (*_CONDA, "-e", "--env", "-r", "--root-prefix"),
    "pdm": ("-p", "--project"),
    "pipenv": (),
    "pixi": ("-e", "--environment", "--manifest-path"),
    "poetry": ("-C", "--directory", "-P", "--project"),
    "rye": (),
    "uv": _UV,
}
"""Environment managers whose verb `run` runs another program: their options that take the next
word. Options may come before the verb, too."""
_RUNS_MODULE: Final = {"uv": ("-m", "--module")}
"""Last options of environment managers that make the program a Python module."""
_SPLIT: Final = ("--split-string=", "--split-string", "-S", "-vS")
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_]\w*\+?=")
_OPERATORS: Final = ";&|()<>\n"
_OPERATOR: Final = re.compile(r"[();\n]|[^();\n]+")
_LITERAL: Final = re.compile(
    r"(?P<gone>\\\n|(?<![^\s;&|()])#[^\n]*)|(?P<output>`(?:\\.|[^`\\])*`)"
    r"|'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.",
    re.S,
)
_ARGUMENTS: Final = "$@"
_PRIVATE: Final = 0xE000
_HIDE: Final = {ord(c): chr(_PRIVATE + ord(c)) for c in _OPERATORS}
_SHOW: Final = {_PRIVATE + ord(c): c for c in _OPERATORS}


def launcher_in(command: Sequence[str], depth: int = DEPTH_MAX) -> str:
    """Return the program or module in a command that starts ranks itself; empty if there is none.

    Args:
        command: The words of one command, as a container has them.
        depth: How many shells within it are looked into.
    """
    words = _unwrapped(command)
    name = PurePath(words[0]).name if words else ""
    if name in LAUNCHERS:
        return name
    if name in _SHELLS and depth:
        launchers = (launcher_in(each, depth - 1) for each in _commands_of_shell(words))
        return next(filter(None, launchers), "")
    if name.startswith("python"):
        option, module = python_runs(words)
        return f"-m {module}" if option == "-m" and module in _MODULES else ""
    verb = _LAUNCHING_VERBS.get(name)
    return f"{name} {verb}" if verb is not None and words[1:2] == [verb] else ""


def _unwrapped(command: Sequence[str]) -> list[str]:
    """Return the program that is run in the end, with its arguments; empty if none is known.

    Each word is looked at once, so that a command of any length takes linear time.
    """
    rest = list(reversed(command))
    while rest:
        name = PurePath(rest[-1]).name
        if name in _RUNNERS:
            rest.pop()
            _drop_options(rest, _RUNNERS[name])
            if not rest or rest.pop() != "run":
                return []
            if _drop_options(rest, _RUNNERS[name]) in _RUNS_MODULE.get(name, ()):
                rest += ("-m", "python")
        elif name in _WRAPPERS:
            rest.pop()
            if name == "command" and rest[-1:] in (["-v"], ["-V"]):
                return []  # it prints where a program is and runs nothing
            with_value, own = _WRAPPERS[name]
            _drop_options(rest, with_value, _SPLIT if name == "env" else ())
            del rest[len(rest) - own :]
            while name in ("env", "sudo") and rest and _ASSIGNMENT.match(rest[-1]):
                rest.pop()
        else:
            break
    return rest[::-1]


def _drop_options(rest: list[str], with_value: Sequence[str], split: Sequence[str] = ()) -> str:
    """Take options and their values from a reversed list of words.

    Args:
        rest: The words, the next one last.
        with_value: Options whose value is the next word.
        split: Beginnings of options whose value, attached or next, is a list of further words.

    Returns:
        The last option.
    """
    option = ""
    while rest and rest[-1].startswith("-"):
        word = rest.pop()
        if word == "--":
            break
        option = word
        begins = next((each for each in split if option.startswith(each)), None)
        if begins is not None:
            line = option.removeprefix(begins) or (rest.pop() if rest else "")
            with contextlib.suppress(ValueError):  # an unclosed quote
                rest += reversed(shlex.split(line))
        elif option in with_value and rest:
            rest.pop()
    return option


def python_runs(command: Sequence[str]) -> tuple[str, str]:
    """Return what a Python command runs, after the option that names it.

    Args:
        command: The words of the command; the first is the interpreter.

    Returns:
        `("-m", module)`, `("-c", code)` or `("", script)`; the script is empty if there is none.
    """
    rest = iter(command[1:])
    for word in rest:
        if word in _PYTHON_WITH_VALUE:
            next(rest, "")
        elif not word.startswith("-"):
            return "", word
        elif word[:2] not in ("--", "-W", "-X") and (flag := re.search("[cm]", word)):
            return f"-{flag[0]}", word[flag.end() :] or next(rest, "")
    return "", ""


def launched_script(command: Sequence[str]) -> tuple[str, ...]:
    """Return the script that `paceline launch` runs unchanged in a rank, with its arguments.

    Args:
        command: The words of the command: `paceline launch`, or Python that runs the same module.

    Returns:
        Path of the script, or `-m` and a module, and its arguments. Empty for any other command.
    """
    name = PurePath(command[0]).name if command else ""
    rest: Sequence[str] = ()
    if name == PROGRAM:
        rest = command[1:]
    elif name.startswith("python"):
        option, module = python_runs(command)
        if option != "-m" or module not in (PROGRAM, LAUNCH_MODULE):
            return ()
        at = next(index for index, word in enumerate(command) if word.endswith(module))
        rest = command[at + 1 :]
        if module == LAUNCH_MODULE or rest[:1] == ["-m"] or "".join(rest[:1]).endswith(".py"):
            return tuple(rest)
    return tuple(rest[1:]) if rest[:1] and rest[0] == "launch" else ()


def _commands_of_shell(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield each command of the line that a shell is given by `-c`.

    The arguments of the line are yielded only once, where it first runs them: `exec "$@"`. A
    repetition would find the same, and would take exponential time with nested shells.

    Args:
        words: The words of the shell's command.

    Yields:
        The words of one command.
    """
    at, has_line = 1, False
    while at < len(words) and words[at][:1] in ("-", "+"):
        option = words[at]
        is_short = not option.startswith("--")
        has_line = has_line or (is_short and option[0] == "-" and "c" in option)
        has_value = "o" in option.lower() if is_short else option in _SHELL_WITH_VALUE
        at += 2 if has_value else 1
    if not has_line or at >= len(words):
        return
    arguments = list(words[at + 2 :])
    for command in commands_in(words[at]):
        if _unwrapped(command)[:1] == [_ARGUMENTS]:
            yield arguments
            arguments = []
        else:
            yield command


def commands_in(line: str) -> Iterator[list[str]]:
    """Yield the words of each command of a shell's line, in order.

    Assignments, redirections and command substitutions are left out. Nothing is yielded from a
    here-document on, or for a line with an unclosed quote.

    Args:
        line: The line; it may contain line breaks.

    Yields:
        The words of one command.
    """
    try:
        tokens = _tokens(line)
    except ValueError:
        return
    words: list[str] = []
    depth, is_target, previous = 0, False, ""  # depth: open parentheses of a substitution
    for token, is_operator in tokens:
        begins = is_operator and token == "(" and previous.endswith("$")
        previous = "" if is_operator else token
        if depth or begins:
            depth += {"(": 1, ")": -1}.get(token, 0) if is_operator else 0
        elif is_target and not is_operator:
            is_target = False
        elif is_operator and ("<" in token or ">" in token):
            if "<<" in token and "<<<" not in token:
                break
            if words and words[-1].isdigit():
                words.pop()
            is_target = True
        elif is_operator:
            if words:
                yield words
            words, is_target = [], False
        elif words or not (token in _RESERVED or _ASSIGNMENT.match(token)):
            words.append(token)
    if words:
        yield words


def _tokens(line: str) -> list[tuple[str, bool]]:
    """Split a shell's line into words and operators.

    The output of a command in backquotes is replaced by the word `_`. An unclosed quote raises
    ValueError.

    Args:
        line: The line.

    Returns:
        Pairs of token and True if it is an operator.
    """

    def hidden(match: re.Match[str]) -> str:
        if match["gone"] is not None:
            return ""
        return match[0].translate(_HIDE) if match["output"] is None else "_"

    lexer = shlex.shlex(_LITERAL.sub(hidden, line), posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    tokens: list[tuple[str, bool]] = []
    for word in lexer:
        if word[:1] in tuple(_OPERATORS):  # several operators in a row, such as ");"
            tokens += [(operator, True) for operator in _OPERATOR.findall(word)]
        else:
            tokens.append((word.translate(_SHOW), False))
    return tokens
