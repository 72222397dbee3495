"""`shiva serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from shiva.cli.terminal import Device, Dtype


def serve(
    model: Annotated[str, typer.Argument(help="Folder or hub id of a diffusers pipeline")] = "models/emoji",
    checkpoint: Annotated[
        str | None, typer.Option(help="Trained Shiva checkpoint; without one, a moving band and cached updates")
    ] = None,
    guidance: Annotated[float, typer.Option(help="Guidance scale")] = 4.0,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets others in")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on", min=1, max=65535)] = 7860,
    steps: Annotated[int, typer.Option(help="Denoising steps to start with", min=4, max=50)] = 20,
) -> None:
    """Open a page on this machine that draws a prompt dense and reduced, side by side."""
    from shiva.show.server import run_server

    run_server(model, checkpoint, guidance, device, dtype, host, port, steps)
