"""`shiva serve`: drag the budget and see what it costs. Needs gradio, the extra `serve`."""

from __future__ import annotations

import contextlib
import io
import ipaddress
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from shiva.core.needs import need
from shiva.evaluate.drawing import load_with_arguments, of_images, quiet
from shiva.show import figures
from shiva.show.studio import BUDGETS, LONGEST_PROMPT, SEEDS, STEPS, Drawn, Request, Studio, ways_for, whole_number
from shiva.show.style import encode

SIDE = 384
"""Pixels of an image on the page; small ones are enlarged alike."""
WAITING = 16
"""Drawings in the queue; more are turned away. Masks do not wait behind them, nor tables but a method's first."""
LARGEST = 1 << 16
"""Bytes of a request."""
KEPT = (600, 3600)
"""Seconds between looks at the image files that gradio keeps, and the age at which they go."""
TABLE = "share of the image that each layer computes at each step"
SHARE = 0.6
"""What the page opens with."""
ABOUT = "Both images come from the same prompt and noise. Times are of this machine, measured after a warm-up."
MEANINGS = {
    "Shiva": "A small trained network picks the parts of the image that each layer computes.",
    "Sweep": "Nothing trained: a band moves over the image; the rest reuses what it last had. For 8 steps or more.",
    "Lattice": "Nothing trained: an even pattern is computed, the rest is estimated. For few steps.",
    "Fewer steps": "The whole image, in fewer steps: what the other methods have to beat.",
    "ToMeSD": "Token Merging: similar parts of the image share one computation of attention.",
}
"""What each method of the menu does, in a line."""
SYSTEM_FONTS = ("system-ui", "sans-serif")
CSS = """
footer { display: none !important; }
#figures table { width: 100%; } #figures th, #figures td { border-color: #8886 !important; }
"""


def run_server(
    model: str, checkpoint: str | None, guidance: float, device: str, dtype: str, host: str, port: int, steps: int
) -> None:
    """Open a page that draws a prompt dense and reduced, side by side; until Ctrl-C."""
    need_gradio()
    quiet()
    ways = ways_for(model, checkpoint)
    pipe, arguments = load_with_arguments(model, dtype, device)
    page = build(Studio(of_images(pipe), ways, guidance, **arguments), Path(model).name, steps)
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
        app_kwargs={"middleware": [(OwnPagesOnly, (host,), {})]},
    )
    return address


class OwnPagesOnly:
    """Refuses requests under another name than ours: a page elsewhere may have had its name point here (rebinding).

    Ours are localhost, the address we listen on and, where that is all of them, any address in numbers. A request with
    more than `LARGEST` bytes, or that does not say how many, is refused too: the page sends a prompt and some numbers.
    """

    def __init__(self, app: Any, host: str) -> None:
        self.app, self.host = app, host

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope.get("headers", ())}
        refusal = self.refusal(headers) if scope["type"] in ("http", "websocket") else None
        if refusal is None:
            return await self.app(scope, receive, send)
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return None
        status, body = refusal
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": body})
        return None

    def refusal(self, headers: dict[str, str]) -> tuple[int, bytes] | None:
        """Status and text, if a request is not served."""
        origin, length = headers.get("origin"), headers.get("content-length", "0")
        if not self.ours(headers.get("host", "")) or not (origin is None or self.ours(origin.partition("://")[2])):
            return 403, b"refused: open this page by the address it was started with"
        if "transfer-encoding" in headers or not (length.isdecimal() and int(length) <= LARGEST):
            return 413, b"refused: a request is too large, or does not say how large it is"
        return None

    def ours(self, address: str) -> bool:
        name = (urlsplit(f"//{address}").hostname or "").lower()
        if name in ("localhost", "127.0.0.1", "::1", self.host.lower()):
            return True
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_unspecified and bool(ipaddress.ip_address(name))
        return False


def build(studio: Studio, model: str, steps: int) -> Any:
    """The page: what is asked on the left, two images and their figures on the right, the table and masks below.

    It opens with a drawing, for which every method that is shown has run before.
    """
    gradio = need_gradio()
    last, first = studio.spec.layers - 1, next(iter(studio.ways))
    opening = Request(studio.example, 0, steps, SHARE, first)
    shown_first = studio.draw(opening)
    at = min(last, studio.spec.layers // 2), (len(shown_first.masks) - 1) // 2
    title = f"Shiva: the same image from less computation ({model})"
    with gradio.Blocks(title=title, analytics_enabled=False, delete_cache=KEPT) as page:
        gradio.Markdown(f"## {title}\n{ABOUT}")
        with gradio.Row():
            with gradio.Column(scale=1, min_width=280):
                prompt = gradio.Textbox(opening.prompt, label="Prompt", max_length=LONGEST_PROMPT, elem_id="prompt")
                way = gradio.Dropdown(list(studio.ways), value=first, label="Method", elem_id="method")
                meaning = gradio.Markdown(MEANINGS.get(first, ""), elem_id="meaning")
                budget = gradio.Slider(
                    *BUDGETS, value=SHARE, step=0.05, label="Share of the image that is computed", elem_id="budget"
                )
                count = gradio.Slider(*STEPS, value=steps, step=1, label="Steps", elem_id="steps")
                seed = gradio.Number(0, label="Seed", precision=0, minimum=SEEDS[0], maximum=SEEDS[1], elem_id="seed")
                go = gradio.Button("Draw", variant="primary", elem_id="draw")
            with gradio.Column(scale=2, min_width=320):
                with gradio.Row():
                    dense = picture(gradio, "Everything computed", "dense", enlarge(shown_first.dense))
                    reduced = picture(gradio, "Computed in part", "reduced", enlarge(shown_first.reduced))
                summary = gradio.Markdown(figures_of(shown_first), elem_id="figures")
        with gradio.Row():
            with gradio.Column(scale=2, min_width=320):
                table = picture(gradio, TABLE, "table", labelled=False)
                planned = gradio.Markdown(elem_id="planned")
            with gradio.Column(scale=1, min_width=280):
                where, told = masked(shown_first, *at)
                overlay = picture(gradio, "What was computed, in colour", "overlay", where)
                layer = gradio.Slider(0, last, value=at[0], step=1, label="Layer of the model", elem_id="layer")
                step = gradio.Slider(0, max(steps - 1, 1), value=at[1], step=1, label="Step", elem_id="step")
                share = gradio.Markdown(told, elem_id="share")
        drawn = gradio.State(shown_first)

        def place(layer: Any, step: Any) -> tuple[int, int]:
            """A layer and step; of a shorter run the last step stands for those after it."""
            return whole_number("layer", layer, 0, last), whole_number("step", step, 0, STEPS[1] - 1)

        def preview(budget: Any, steps: Any, way: Any) -> tuple[Any, str, str]:
            return guarded(gradio, lambda: show_plan(studio, Request.read("any", 0, steps, budget, way)))

        def draw(prompt: Any, seed: Any, steps: Any, budget: Any, way: Any, layer: Any, step: Any) -> tuple[Any, ...]:
            request = guarded(gradio, lambda: Request.read(prompt, seed, steps, budget, way))
            at = guarded(gradio, lambda: place(layer, step))  # before an image is drawn for nothing
            result = guarded(gradio, lambda: studio.draw(request))
            longest = max(len(result.masks) - 1, 1)
            moved = gradio.Slider(maximum=longest, value=min(at[1], longest))
            images = enlarge(result.dense), enlarge(result.reduced)
            return *images, figures_of(result), result, moved, *masked(result, *at)

        def mask(result: Drawn | None, layer: Any, step: Any) -> tuple[Any, str]:
            return (None, "") if result is None else masked(result, *guarded(gradio, lambda: place(layer, step)))

        asked = [prompt, seed, count, budget, way, layer, step]
        shown = [dense, reduced, summary, drawn, step, overlay, share]
        one = {"trigger_mode": "always_last", "concurrency_id": "pipe", "concurrency_limit": 1}
        gradio.on([go.click, prompt.submit, budget.release, way.input], draw, asked, shown, **one)
        live = {"show_progress": "hidden", "queue": False, "trigger_mode": "always_last"}
        turned, plan = [budget.change, count.change, way.change, page.load], [table, planned, meaning]
        gradio.on(turned, preview, [budget, count, way], plan, **live)
        gradio.on([layer.change, step.change], mask, [drawn, layer, step], [overlay, share], **live)
    return page


def masked(result: Drawn, layer: int, step: int) -> tuple[Any, str]:
    """The reduced image with what a layer left out veiled, and how much it computed."""
    chosen = result.masks[min(step, len(result.masks) - 1), layer]
    told = f"{chosen.float().mean():.0%} of {chosen.numel()} tokens (small squares of the image)"
    return figures.overlay(result.reduced, chosen, SIDE), told


def picture(gradio: Any, label: str, name: str, image: Any = None, labelled: bool = True) -> Any:
    look = {"show_label": labelled, "format": "png", "interactive": False, "buttons": ["fullscreen"]}
    return gradio.Image(image, label=label, alt_text=label, elem_id=name, **look)


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


def show_plan(studio: Studio, request: Request) -> tuple[Any, str, str]:
    """The shifted table as a picture, what it will cost, and what the method does."""
    from PIL import Image

    plan, meaning = studio.plan(request), MEANINGS.get(request.way, "")
    if plan is None:
        return None, f"What {request.way} computes is counted when it draws.", meaning
    drawn = Image.open(io.BytesIO(encode(figures.schedule_map(plan.keep, plan.timesteps, TABLE), dpi=110)))
    return drawn, f"Planned: {plan.flops:.0%} of the computation, at best {1 / plan.flops:.2f}x as fast.", meaning


def flops(tera: float) -> str:
    return f"{tera:.3g} T" if tera >= 1 else f"{1e3 * tera:.3g} G"


def figures_of(result: Drawn) -> str:
    """Time and computation of both images."""
    same = result.psnr == float("inf")
    when = " when first drawn" if result.remembered else ""
    whole, part = flops(result.dense_tflops), flops(result.dense_tflops * result.flops)
    return "\n".join(
        (
            "| | everything | in part | |",
            "|---|---|---|---|",
            f"| time | {result.dense_seconds:.2f} s{when} | {result.seconds:.2f} s | "
            f"**{result.dense_seconds / result.seconds:.2f}x as fast** |",
            f"| computation (FLOPs) | {whole} | {part} | {result.flops:.0%} |",
            f"| likeness (PSNR) | | {'identical' if same else f'{result.psnr:.1f} dB'} | "
            f"{'' if same else 'above 30: hard to tell apart'} |",
        )
    )
