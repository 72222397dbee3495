"""`shiva serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from shiva.cli.terminal import Device, Dtype


def serve(
    model: Annotated[
        str | None, typer.Argument(help="Folder or hub id of a diffusers pipeline; the embedded model otherwise")
    ] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Folder or hub id of a trained checkpoint for it")] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale; the embedded model's own otherwise")] = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets others in")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on", min=1, max=65535)] = 7860,
    steps: Annotated[int | None, typer.Option(help="Denoising steps to start with", min=1, max=50)] = None,
) -> None:
    """Open a page on this machine that draws a prompt dense and reduced, side by side."""
    from shiva.evaluate.checkout import TURBO, embedded, usual_run
    from shiva.show.server import run_server

    chosen = str(embedded(*TURBO)) if model is None else model
    usual_steps, usual_guidance = usual_run(chosen)
    scale, count = usual_guidance if guidance is None else guidance, usual_steps if steps is None else steps
    run_server(chosen, checkpoint, scale, device, dtype, host, port, count)
