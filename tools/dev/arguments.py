"""The arguments of a ./dev command."""

from __future__ import annotations

from tools.dev.processes import Failure


def take_flag(arguments: list[str], flag: str) -> bool:
    found = flag in arguments
    if found:
        arguments.remove(flag)
    return found


def take_option(arguments: list[str], option: str, default: str) -> str:
    if option not in arguments:
        return default
    at = arguments.index(option)
    if at + 1 == len(arguments):
        raise Failure(f"{option} needs a value")
    value = arguments[at + 1]
    del arguments[at : at + 2]
    return value


def no_arguments(command: str, arguments: list[str]) -> None:
    if arguments:
        raise Failure(f"'{command}' does not know {' '.join(arguments)}; see ./dev --help")
