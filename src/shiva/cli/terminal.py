"""What the commands share: folders of results, lines of progress, and what a failure looks like."""

from __future__ import annotations

import contextlib
import errno
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

Output = Annotated[Path | None, typer.Option(help="Folder of what is written; outputs/ and the command's otherwise")]
Record = Annotated[bool, typer.Option("--record", help="Write to results/, which is committed, not to outputs/")]
Device = Annotated[str, typer.Option(help="Where to run: cpu, cuda, …")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16")]
Height = Annotated[int | None, typer.Option(min=1, help="Image height in pixels; else the model's own")]
Width = Annotated[int | None, typer.Option(min=1, help="Image width in pixels; else the model's own")]


def use_threads(count: int | None) -> int | None:
    if count is not None:
        import torch

        torch.set_num_threads(count)
    return count


Threads = Annotated[
    int | None, typer.Option(min=1, callback=use_threads, help="CPU threads; torch's choice otherwise")
]
"""Set as the option is read."""

TO_MEND = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EROFS, errno.ENOSPC}
TO_MEND |= {errno.EDQUOT, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP}
"""Of the system's errors, those about a path or a disk."""


def explain(error: Exception) -> int:
    """Print what went wrong; the exit code: 2 where a person can mend it, 1 with a traceback where only we can."""
    from shiva.core.options import REFUSALS

    text = str(error)
    if isinstance(error, OSError) and error.errno in TO_MEND:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        mend = "make room and run the same command again" if full else "pass another path"
        text = f"{error.filename or 'a file'}: {error.strerror}; {mend}"
    elif type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in text:  # torch's, on GPU and CPU
        less = "a smaller image or batch, in training sampling.micro_batch: 1 or compute.gradient_checkpointing: true"
        text = f"{'. '.join(text.split('. ')[:2])}; do less at once: {less}"
    elif type(error).__module__.startswith("yaml."):
        text = f"this is not YAML: {text}; mend that line"
    elif not isinstance(error, REFUSALS):
        where = "please report it as an issue of Shiva's repository, with these lines"
        typer.secho(f"error: this is a bug of ours; {where}", fg="red", err=True)
        typer.echo("".join(traceback.format_exception(error)), err=True, nl=False)
        return 1
    typer.secho(f"error: {' '.join(text.split())}", fg="red", err=True)
    return 2


def folder_of(output: Path | None, record: bool, name: str) -> Path:
    """Where results go: outputs/ by default, so that trying a command changes no committed figure."""
    if output is not None and record:
        raise ValueError(f"--output {output} and --record exclude each other; pass one")
    return check_folder(output if output is not None else Path("results" if record else "outputs") / name)


def check_folder(path: Path) -> Path:
    """A folder that can be made: refused before the work, not after it."""
    above = next((part for part in (path, *path.parents) if part.exists() or part.is_symlink()), path)
    if (above.exists() or above.is_symlink()) and not above.is_dir():
        what = "a file" if above.exists() else "a link to nothing"
        raise ValueError(f"{above} is {what}, so nothing can be written in {path}; pass another --output")
    return path


def settings_from(pairs: list[str] | None) -> dict[str, Any]:
    """Options given as `--set key=value`, their values read as YAML reads them: numbers, lists, true, null."""
    from shiva.core.needs import need

    yaml: Any = need("yaml", "metrics") if pairs else None
    found: dict[str, Any] = {}
    for pair in pairs or []:
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"--set {pair} has no value; pass --set key=value, for example --set ratio=0.5")
        try:
            found[key.strip()] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(
                f"--set {pair} does not read as YAML; quote the value, as in --set key='[1, 2]'"
            ) from error
    return found


def numbers(option: str, text: str, kind: type = float) -> tuple[Any, ...]:
    """Numbers between commas, each once."""
    return tuple(dict.fromkeys(listed(option, text, kind)))


def some(option: str, text: str, least: int = 0) -> tuple[int, ...]:
    """Whole numbers between commas, each once: at least one, and none below `least`."""
    found = numbers(option, text, int)
    if not found:
        raise ValueError(f"{option} names none; pass such as {option} {least},{least + 1}")
    if min(found) < least:
        raise ValueError(f"{option} {text} holds {min(found)}; pass {least} or more")
    return found


def listed(option: str, text: str, kind: type = float) -> list[Any]:
    """Numbers between commas."""
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        whole = "whole number" if kind is int else "number"
        raise ValueError(f"{option} {text} holds what is no {whole}; pass such as {option} 0,1") from error


@contextlib.contextmanager
def progress_line(shown: bool = True) -> Iterator[Callable[[str], None]]:
    """What is being done, and since when; without a terminal, a line every ten seconds."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not shown:
        yield lambda text: None
        return
    if not console.is_terminal:
        last = [time.monotonic()]

        def say(text: str) -> None:
            if time.monotonic() - last[0] > 10:
                last[0] = time.monotonic()
                console.print(text, highlight=False, markup=False)

        yield say
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, transient=True, console=console) as progress:
        task = progress.add_task("preparing", total=None)
        yield lambda text: progress.update(task, description=text)
