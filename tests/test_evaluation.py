"""`shiva eval`: resumable, the same over processes, paired to the bit, and honest about what it could not do."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipelines import call_sd3, sd3
from shiva.measure.evaluation.cost import Prices, record, replay
from shiva.measure.evaluation.evaluation import Evaluation
from shiva.measure.evaluation.lineup import Contender, Lineup, read_lineup
from shiva.measure.evaluation.match import TOLERANCE, matched
from shiva.measure.evaluation.paired import Paired
from shiva.measure.evaluation.protocols import PROTOCOLS
from shiva.measure.evaluation.run import Settings, noise_seed
from shiva.measure.evaluation.workers import Workers
from shiva.measure.prompts import Prompt, PromptSet
from shiva.measure.quality import Tools, chosen
from shiva.measure.sheet import Sheet

REPOSITORY = Path(__file__).parents[1]
PROMPTS = PromptSet("three", tuple(Prompt(text, group) for text, group in (("a", "x"), ("b", "x"), ("c", "y"))))
LINEUP = {
    "dense": Contender(),
    "dense again": Contender(),
    "ToMeSD": Contender(method="ToMeSD"),
    "random": Contender(method="Shiva", options={"budget": 0.5, "score": "random"}, preset="official"),
}


class Prompted:
    """A tiny SD3 pipeline without text encoders that takes prompts: each text has embeddings of its own."""

    def __init__(self) -> None:
        self.real: Any = sd3()
        self.real.set_progress_bar_config(disable=True)
        self.calls = 0

    @property
    def transformer(self) -> Any:
        return self.real.transformer

    @transformer.setter
    def transformer(self, module: Any) -> None:
        self.real.transformer = module

    @property
    def scheduler(self) -> Any:
        return self.real.scheduler

    def __copy__(self) -> Prompted:
        return Prompted()

    def __call__(self, prompt: list[str], guidance_scale: float, **arguments: Any) -> Any:
        self.calls += 1
        given = call_sd3(1, guidance_scale)
        shift = [torch.tensor(float(ord(text[0]) % 7)) / 7 for text in prompt]
        for name, value in list(given.items()):
            if isinstance(value, torch.Tensor):
                given[name] = torch.cat([value + by for by in shift])
        return self.real(**given, **arguments)


@pytest.fixture(scope="module")
def pipe() -> Prompted:
    return Prompted()


@pytest.fixture
def evaluation(tmp_path: Path, pipe: Prompted) -> Evaluation:
    return make(tmp_path, pipe)


def make(folder: Path, pipe: Prompted, **changes: Any) -> Evaluation:
    given: dict[str, Any] = {
        "lineup": Lineup(LINEUP, {"seeds": ["dense", "dense again", "random"]}),
        "settings": Settings("tiny", None, steps=2, guidance=3.0),
        "metrics": chosen(["psnr", "mse"], Tools()),
        "prompts": PROMPTS,
    }
    return Evaluation(
        folder=folder,
        held_out=None,
        tools=Tools(),
        workers=Workers(),
        pipe=lambda: pipe,
        rounds=0,
        probes=1,
        **{**given, **changes},
    )


def images(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob("images/*/*/*.png"))}


# -- generating --------------------------------------------------------------------------------------


def test_images_are_made_once_and_the_rest_on_the_next_run(evaluation: Evaluation, pipe: Prompted) -> None:
    run = evaluation.run()
    assert evaluation.generate(run, ["dense", "ToMeSD"], [0]) == ["dense", "ToMeSD"]
    first, stamps = images(run.folder), {p: p.stat().st_mtime_ns for p in run.folder.glob("images/*/*/*.png")}
    assert len(first) == 6
    gone = run.path("ToMeSD", 0, 1)
    gone.unlink()
    calls = pipe.calls
    evaluation.generate(run, ["dense", "ToMeSD"], [0])
    assert pipe.calls == calls + 1
    assert images(run.folder) == first
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items() if path != gone)
    manifest = json.loads((run.folder / "run.json").read_text())
    assert manifest["contenders"]["ToMeSD"]["config"]["options"]["ratio"] == 0.25
    assert [prompt["text"] for prompt in manifest["prompts"]] == ["a", "b", "c"]
    assert manifest["seeds"] == [0]


def test_every_contender_gets_the_same_noise_and_every_seed_another() -> None:
    drawn = {
        torch.randn(4, generator=torch.Generator().manual_seed(noise_seed(seed, index))).numpy().tobytes()
        for seed in range(5)
        for index in range(200)
    }
    assert len(drawn) == 1000


def test_a_changed_config_under_the_same_name_is_an_error(evaluation: Evaluation, pipe: Prompted) -> None:
    evaluation.generate(evaluation.run(), ["ToMeSD"], [0])
    other = Lineup({**LINEUP, "ToMeSD": Contender(method="ToMeSD", options={"ratio": 0.5})})
    changed = make(evaluation.folder, pipe, lineup=other)
    with pytest.raises(ValueError, match=r"options.ratio is 0.5, was 0.25; give the contender another name"):
        changed.generate(changed.run(), ["ToMeSD"], [0])
    renamed = make(
        evaluation.folder, pipe, lineup=Lineup({"tomesd": Contender(method="ToMeSD", options={"ratio": 0.5})})
    )
    with pytest.raises(ValueError, match=r"images of 'tomesd' made otherwise: options.ratio is 0.5, was 0.25"):
        renamed.generate(renamed.run(), ["tomesd"], [0])
    slower = make(evaluation.folder, pipe, settings=Settings("tiny", None, steps=3, guidance=3.0))
    with pytest.raises(ValueError, match="steps is 3, was 2; pass another --output"):
        slower.generate(slower.run(), ["ToMeSD"], [0])
    fewer = make(evaluation.folder, pipe, prompts=PROMPTS.limited(2))
    with pytest.raises(ValueError, match="2 prompts, not the same as the 3 there"):
        fewer.generate(fewer.run(), ["ToMeSD"], [0])


def test_a_missing_checkpoint_is_left_out_with_the_way_to_train_it(tmp_path: Path, pipe: Prompted) -> None:
    absent = Contender(checkpoint=str(tmp_path / "none"), train="shiva train x.yaml")
    evaluation = make(tmp_path / "out", pipe, lineup=Lineup({**LINEUP, "trained": absent}))
    found = PROTOCOLS["main"](evaluation)
    assert found is not None
    sheets, figures = found
    assert "trained" not in figures["quality"]
    assert "trained left out" in sheets[0].caption
    assert "train it: shiva train x.yaml" in sheets[0].caption


# -- measuring ---------------------------------------------------------------------------------------


def test_a_method_against_itself_differs_by_exactly_nothing(tmp_path: Path, pipe: Prompted) -> None:
    from shiva.measure.quality.base import METRICS, metric

    @metric("brightness", "brightness", needs="images", higher=True)
    def brightness(subject: Any, tools: Tools) -> torch.Tensor:
        return torch.cat([batch.mean((1, 2, 3)) for batch in subject.images.batches()])

    try:
        evaluation = make(tmp_path, pipe, metrics=chosen(["brightness"], Tools()), seeds=(0, 1))
        for protocol in ("seeds", "categories", "transfer", "ratio", "int8"):
            evaluation.lineup.casts[protocol] = ["dense", "dense again", "random"]
            found = PROTOCOLS[protocol](evaluation)
            assert found is not None
            same, other = found[1]["paired"]["dense again"], found[1]["paired"]["random"]
            if protocol == "categories":
                assert set(same) == {"x", "y", "all categories"}
                same, other = same["all categories"], other["all categories"]
            assert same["brightness"]["mean"] == same["brightness"]["deviation"] == 0
            assert same["brightness"]["wins"] == 0.5
            assert other["brightness"]["mean"] != 0
    finally:
        del METRICS["brightness"]


def test_scores_are_kept_and_measured_again_only_if_need_be(evaluation: Evaluation, pipe: Prompted) -> None:
    run = evaluation.run()
    evaluation.generate(run, ["random"], [0])
    score = evaluation.scores(run, "random", 0)["psnr"]
    assert score.each is not None
    assert len(score.each) == 3
    cache = run.folder / "scores" / "random" / "0.json"
    stamp = cache.stat().st_mtime_ns
    again = make(evaluation.folder, pipe)
    assert again.scores(again.run(), "random", 0)["psnr"] == score
    assert cache.stat().st_mtime_ns == stamp


def test_a_metric_without_weights_is_named_and_the_others_run(tmp_path: Path, pipe: Prompted) -> None:
    metrics = chosen(["psnr", "text_image", "frechet"], Tools())
    evaluation = make(tmp_path, pipe, metrics=metrics)
    found = PROTOCOLS["main"](evaluation)
    assert found is not None
    assert found[0][0].columns == ("method", "PSNR to dense, dB ↑")
    assert "text-image score left out: the text-image score needs" in found[0][0].caption
    assert set(found[1]["quality"]["ToMeSD"]) == {"psnr"}


def test_paired_statistics() -> None:
    pair = Paired.of([1.0, 2.0, 4.0], [1.0, 1.0, 1.0], higher=True)
    assert (pair.mean, pair.wins) == (pytest.approx(4 / 3), pytest.approx(2.5 / 3))
    assert pair.error == pytest.approx(1.5275 / 3**0.5, rel=1e-3)
    assert Paired.of([1.0], [2.0], higher=False).wins == 1


# -- cost --------------------------------------------------------------------------------------------


def test_cost_is_measured_on_the_dense_path(evaluation: Evaluation) -> None:
    run = evaluation.run()
    recording = record(run, [0, 1], 0)
    assert len(recording.calls) == 4
    dense = replay(run, Contender(), recording)
    assert (dense.share, dense.one_step_mse) == (1.0, 0.0)
    half, most = (
        replay(run, Contender("Shiva", "official", options={"budget": budget, "score": "norm"}), recording)
        for budget in (0.5, 0.9)
    )
    assert half.share < most.share < 1
    assert half.one_step_mse > most.one_step_mse > 0
    assert half.share != half.share_paper


def test_methods_are_brought_to_the_same_flops(evaluation: Evaluation) -> None:
    run = evaluation.run()
    run.contenders["NeuralSort"] = Contender("NeuralSort")
    prices = Prices(run, 1)
    target = prices.of("random").share
    for name in ("NeuralSort", "random"):
        assert prices.share(matched(prices, name, target)) == pytest.approx(target, abs=TOLERANCE)
    with pytest.raises(ValueError, match="ToMeSD comes no nearer to"):
        matched(prices, "ToMeSD", 0.2)
    run.contenders["DiffCR"] = Contender("DiffCR")
    with pytest.raises(ValueError, match="DiffCR has no knob at inference"):
        matched(prices, "DiffCR", target)


def test_matched_protocol_shows_everyone_at_one_share(evaluation: Evaluation) -> None:
    evaluation.lineup.casts["matched"] = ["random", "ToMeSD"]
    found = PROTOCOLS["matched"](evaluation)
    assert found is not None
    assert "random" in found[1]["quality"]
    assert all(isinstance(sheet, Sheet) for sheet in found[0])


def test_other_sizes_are_runs_of_their_own(tmp_path: Path, pipe: Prompted) -> None:
    lineup = Lineup(LINEUP, {"heldout": ["random"]})
    evaluation = make(tmp_path, pipe, lineup=lineup)
    with pytest.raises(ValueError, match="needs --held-out FILE"):
        PROTOCOLS["heldout"](evaluation)
    held_out = PromptSet("other", (Prompt("d"),))
    evaluation.held_out = held_out
    found = PROTOCOLS["heldout"](evaluation)
    assert found is not None
    assert (tmp_path / "runs" / "held-out" / "images" / "random" / "0" / "00000.png").is_file()


def test_int8_is_there_for_as_long_as_the_contender_runs(
    evaluation: Evaluation, pipe: Prompted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for torchao that rounds weights: which layers it gets, and that nothing of it stays."""
    touched: list[torch.nn.Module] = []

    def quantize(module: torch.nn.Module, config: object) -> None:
        touched.append(module)
        for parameter in module.parameters():
            parameter.data = parameter.data.mul(8).round().div(8)

    fake = SimpleNamespace(Int8DynamicActivationInt8WeightConfig=lambda: None, quantize_=quantize)
    monkeypatch.setitem(sys.modules, "torchao.quantization", fake)
    run = evaluation.run()
    recording = record(run, [0], 0)
    one, two = (replay(run, Contender(int8=blocks), recording).one_step_mse for blocks in (1, 2))
    assert len(touched) == 2 * (1 + 2)
    assert 0 < one < two
    assert replay(run, Contender(), recording).one_step_mse == 0
    with pytest.raises(ValueError, match="int8: 99 is more than the"):
        replay(run, Contender(int8=99), recording)


# -- contenders --------------------------------------------------------------------------------------


def test_the_embedded_lineup_is_whole() -> None:
    lineup = read_lineup(str(REPOSITORY / "recipes" / "eval" / "emoji.yaml"))
    assert set(lineup.casts) == set(PROTOCOLS)
    for name in ("ToMeSD", "ToFu", "SDTM", "ToMA", "IBTM"):
        assert lineup.contenders[name].config()["method"] == name
    assert lineup.contenders["Shiva 90"].checkpoint == "models/shiva/80"
    assert all(entry.train for entry in lineup.contenders.values() if entry.checkpoint)


def test_contenders_are_checked_at_the_door(tmp_path: Path) -> None:
    assert list(read_lineup("ToMeSD,ToMA:official").contenders) == ["dense", "ToMeSD", "ToMA:official"]
    with pytest.raises(ValueError, match="did you mean 'ToMeSD'"):
        read_lineup("ToMeSd")
    with pytest.raises(ValueError, match="would share the folder shiva-80"):
        Lineup({"Shiva 80": Contender(), "shiva-80": Contender()})
    with pytest.raises(ValueError, match="casts.main has no option 'ToMa'"):
        Lineup({"ToMA": Contender(method="ToMA")}, {"main": ["ToMa"]})
    path = tmp_path / "lineup.yaml"
    path.write_text("contenders: {x: {method: ToMA, ratio: 1}}")
    with pytest.raises(ValueError, match="Contender has no option 'ratio'"):
        read_lineup(str(path))


# -- the command, killed and in several processes -------------------------------------------------------


def command(output: Path, prompts: Path, **environment: str) -> subprocess.Popen[str]:
    arguments = ["eval", REPOSITORY / "models" / "emoji", "--methods", prompts.with_suffix(".yaml")]
    arguments += ["--prompts", prompts, "--output", output, "--rounds", "0", "--probes", "1", "--metrics", "psnr,mse"]
    return subprocess.Popen(
        [sys.executable, "-m", "shiva", *map(str, arguments)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def small(tmp_path: Path) -> Path:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("pizza\na fox\nrocket\ncastle\n")
    prompts.with_suffix(".yaml").write_text(
        "{steps: 2, guidance: 3.0, without: [text_encoder_3, tokenizer_3], arguments: {max_sequence_length: 0}, "
        "contenders: {dense: {}, ToMeSD: {method: ToMeSD}}}"
    )
    return prompts


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not condition() and process.poll() is None:
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not (REPOSITORY / "models" / "emoji" / "model_index.json").is_file(), reason="no embedded model")
def test_killed_and_resumed_gives_the_images_of_two_processes_in_one_go(tmp_path: Path, small: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [command(tmp_path / "two", small, RANK=str(r), LOCAL_RANK=str(r), **common) for r in range(2)]
    texts = [rank.communicate(timeout=800)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], texts
    whole = images(tmp_path / "two")
    assert len(whole) == 8
    assert "MSE to dense" in texts[0]
    assert "MSE to dense" not in texts[1]

    killed = tmp_path / "killed"
    process = command(killed, small)
    wait_for(lambda: len(images(killed)) >= 2, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {path: path.stat().st_mtime_ns for path in killed.glob("images/*/*/*.png")}
    assert 2 <= len(before) < len(whole)
    resumed = command(killed, small)
    text, _ = resumed.communicate(timeout=800)
    assert resumed.returncode == 0, text
    assert images(killed) == whole
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in before.items())
    assert (killed / "tables" / "main.json").is_file()
