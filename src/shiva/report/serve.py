"""`shiva serve`: drag the budget and see what it costs. Needs gradio, the extra `serve`."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from shiva.checkpoint import ShivaCheckpoint
from shiva.core.needs import need
from shiva.measure.generate import load_with_arguments, quiet
from shiva.measure.style import encode
from shiva.report import figures
from shiva.report.studio import BUDGETS, LONGEST_PROMPT, SEEDS, STEPS, UNTRAINED, Drawn, Request, Studio

SIDE = 384
"""Pixels of an image on the page; small ones are enlarged alike."""
WAITING = 16
"""Drawings in the queue; more are turned away. Tables and masks do not wait behind them."""
KEPT = (600, 3600)
"""Seconds between looks at the image files that gradio keeps, and the age at which they go."""
TABLE = "share of tokens kept at this budget"
SYSTEM_FONTS = ("system-ui", "sans-serif")
CSS = """
footer { display: none !important; }
#figures table { width: 100%; } #figures th, #figures td { border-color: #8886 !important; }
"""


def serve(
    model: Annotated[str, typer.Argument(help="Folder or hub id of a diffusers pipeline")] = "models/emoji",
    checkpoint: Annotated[
        str | None, typer.Option(help="Trained Shiva checkpoint; without one, a moving band and cached updates")
    ] = None,
    guidance: Annotated[float, typer.Option(help="Guidance scale")] = 4.0,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, ...")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets others in")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on", min=1, max=65535)] = 7860,
    steps: Annotated[int, typer.Option(help="Denoising steps to start with", min=STEPS[0], max=STEPS[1])] = 20,
) -> None:
    """Open a page on this machine that draws a prompt dense and reduced, side by side."""
    need_gradio()
    quiet()
    source = UNTRAINED if checkpoint is None else ShivaCheckpoint.from_pretrained(checkpoint)
    pipe, arguments = load_with_arguments(model, dtype)
    studio = Studio(pipe.to(device), source, guidance, **arguments)
    name = Path(model).name
    about = "nothing trained: a moving band, cached updates" if checkpoint is None else f"checkpoint {checkpoint}"
    page = build(studio, f"Shiva on {name}", about, steps)
    Console().print(f"open http://{host}:{port} ; stop with Ctrl-C")
    try:
        launch(page, host, port)
    except OSError as error:
        raise ValueError(f"cannot listen on {host}:{port} ({error}); pass another --port or --host") from error


def need_gradio() -> Any:
    """Gradio, told beforehand to call nobody."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    return need("gradio", "serve")


def launch(page: Any, host: str, port: int, wait: bool = True) -> str:
    """Serve a page; its address."""
    gradio = need_gradio()
    theme = gradio.themes.Base(primary_hue="orange", font=SYSTEM_FONTS, font_mono=("ui-monospace", "monospace"))
    page.queue(max_size=WAITING, api_open=False, default_concurrency_limit=1)
    _, address, _ = page.launch(
        server_name=host,
        server_port=port,
        share=False,
        show_error=True,
        quiet=True,
        ssr_mode=False,
        prevent_thread_lock=not wait,
        theme=theme,
        css=CSS,
        footer_links=[],
        max_file_size="1kb",
        enable_monitoring=False,
    )
    return address


def build(studio: Studio, title: str, about: str, steps: int) -> Any:
    """The page: what is asked on the left, two images and their figures on the right, the table and masks below."""
    gradio = need_gradio()
    last = studio.spec.layers - 1
    with gradio.Blocks(title=title, analytics_enabled=False, delete_cache=KEPT) as page:
        gradio.Markdown(f"## {title}\n{about}. Guidance {studio.guidance:g}. Times are of this machine.")
        with gradio.Row():
            with gradio.Column(scale=1, min_width=280):
                prompt = gradio.Textbox("red apple", label="Prompt", max_length=LONGEST_PROMPT, elem_id="prompt")
                budget = gradio.Slider(
                    *BUDGETS, value=0.6, step=0.05, label="Budget: share of tokens kept", elem_id="budget"
                )
                count = gradio.Slider(*STEPS, value=steps, step=1, label="Steps", elem_id="steps")
                seed = gradio.Number(0, label="Seed", precision=0, minimum=SEEDS[0], maximum=SEEDS[1], elem_id="seed")
                go = gradio.Button("Draw", variant="primary", elem_id="draw")
            with gradio.Column(scale=2, min_width=320):
                with gradio.Row():
                    dense = picture(gradio, "Dense", "dense")
                    reduced = picture(gradio, "Reduced", "reduced")
                told = gradio.Markdown("Press *Draw*, or drag the budget.", elem_id="figures")
        with gradio.Row():
            with gradio.Column(scale=2, min_width=320):
                table = picture(gradio, TABLE, "table", labelled=False)
                planned = gradio.Markdown(elem_id="planned")
            with gradio.Column(scale=1, min_width=280):
                overlay = picture(gradio, "Tokens that were computed", "overlay")
                layer = gradio.Slider(
                    0, last, value=min(last, studio.spec.layers // 2), step=1, label="Layer", elem_id="layer"
                )
                step = gradio.Slider(0, steps - 1, value=steps // 2, step=1, label="Step", elem_id="step")
                share = gradio.Markdown(elem_id="share")
        drawn = gradio.State(None)

        def preview(budget: Any, steps: Any) -> tuple[Any, str]:
            return guarded(gradio, lambda: show_plan(studio, budget, steps))

        def draw(prompt: Any, seed: Any, steps: Any, budget: Any, layer: int, step: int) -> tuple[Any, ...]:
            request = guarded(gradio, lambda: Request.read(prompt, seed, steps, budget))
            result = guarded(gradio, lambda: studio.draw(request))
            step = min(int(step), request.steps - 1)
            moved = gradio.Slider(maximum=request.steps - 1, value=step)
            images = enlarge(result.dense), enlarge(result.reduced)
            return *images, tell(result), result, moved, *mask(result, layer, step)

        def mask(result: Drawn | None, layer: Any, step: Any) -> tuple[Any, str]:
            if result is None:
                return None, ""
            chosen = result.masks[min(int(step), len(result.masks) - 1), int(layer)]
            told = f"{chosen.float().mean():.0%} of {chosen.numel()} tokens"
            return figures.overlay(result.reduced, chosen, SIDE), told

        asked = [prompt, seed, count, budget, layer, step]
        shown = [dense, reduced, told, drawn, step, overlay, share]
        one = {"trigger_mode": "always_last", "concurrency_id": "pipe", "concurrency_limit": 1}
        gradio.on([go.click, prompt.submit, budget.release], draw, asked, shown, **one)
        live = {"show_progress": "hidden", "queue": False, "trigger_mode": "always_last"}
        gradio.on([budget.change, count.change, page.load], preview, [budget, count], [table, planned], **live)
        gradio.on([layer.change, step.change], mask, [drawn, layer, step], [overlay, share], **live)
    return page


def picture(gradio: Any, label: str, name: str, labelled: bool = True) -> Any:
    return gradio.Image(
        label=label, show_label=labelled, elem_id=name, format="png", interactive=False, buttons=["fullscreen"]
    )


def guarded(gradio: Any, call: Any) -> Any:
    """What a person can mend is told to them; anything else is gradio's to report."""
    try:
        return call()
    except ValueError as error:
        raise gradio.Error(str(error), print_exception=False) from error


def enlarge(image: Any) -> Any:
    from PIL import Image

    scale = SIDE / max(image.size)
    return (
        image if scale <= 1 else image.resize([round(side * scale) for side in image.size], Image.Resampling.BICUBIC)
    )


def show_plan(studio: Studio, budget: Any, steps: Any) -> tuple[Any, str]:
    """The shifted table as a picture, and what it will cost."""
    from PIL import Image

    request = Request.read("any", 0, steps, budget)
    plan = studio.plan(request.budget, request.steps)
    drawn = Image.open(io.BytesIO(encode(figures.schedule_map(plan.keep, plan.timesteps, TABLE), dpi=110)))
    return drawn, f"Planned: {plan.flops:.1%} of dense FLOPs, which allows a speed-up of {1 / plan.flops:.2f}x."


def flops(tera: float) -> str:
    return f"{tera:.3g} T" if tera >= 1 else f"{1e3 * tera:.3g} G"


def tell(result: Drawn) -> str:
    """Time and FLOPs of both images."""
    same = result.psnr == float("inf")
    when = " when first drawn" if result.remembered else ""
    return "\n".join(
        (
            "| | dense | reduced | |",
            "|---|---|---|---|",
            f"| time | {result.dense_seconds:.2f} s{when} | {result.seconds:.2f} s | "
            f"speed-up {result.dense_seconds / result.seconds:.2f}x |",
            f"| FLOPs | {flops(result.dense_tflops)} | {flops(result.dense_tflops * result.flops)} | "
            f"{result.flops:.1%} of dense |",
            f"| PSNR to dense | | {'identical' if same else f'{result.psnr:.1f} dB'} | |",
        )
    )
