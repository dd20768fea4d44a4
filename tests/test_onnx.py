"""The ONNX graph gives transformers' logits in onnxruntime: every family, with and without KV cache, padded or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decoder_cases import CASES, make_decoder
from sojourn.errors import RunFailed, UserError
from sojourn.export.onnx import stored_weights
from sojourn.export.onnx.architecture import FAMILIES, read_architecture
from sojourn.export.onnx.blockwise import BLOCK, quantize_rows
from sojourn.export.onnx.genai import genai_config
from sojourn.export.onnx.write import write
from sojourn.export.open_source import Source
from sojourn.export.progress import NoProgress
from sojourn.export.stage import ExportStage
from sojourn.export.weights_check import relative_error
from sojourn.infer.runtimes import onnx_runtime
from sojourn.infer.runtimes.onnx_runtime import OnnxRuntime
from sojourn.infer.weight_source import FolderWeights
from sojourn.storage.files import read_json_object, write_json

IDS = np.random.default_rng(0).integers(0, 160, 40)
TOLERANCE = 1e-5  # of the largest logit; measured: at most 2e-6
PLAIN = "llama: tied head, heads wider than the width"


def export(folder: Path, quantization: str = "fp32") -> Path:
    weights = FolderWeights(folder)
    source = Source("tiny", weights, weights, (), {}, [], folder)
    with ExportStage(folder.with_name(f"{folder.name}-{quantization}"), source.fingerprint) as stage:
        write(source, stage, quantization, NoProgress())
        return stage.finish({})


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """These models have none."""
    monkeypatch.setattr(onnx_runtime, "open_tokenizer", lambda folder: None)


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def in_pieces(runtime: OnnxRuntime, ids: np.ndarray, mask: np.ndarray, sizes: list[int]) -> np.ndarray:
    cache, rows, start = runtime.empty_cache(len(ids)), [], 0
    for size in sizes:
        stop = start + size
        found, cache = runtime.step(ids[:, start:stop], mask[:, :stop], cache)
        rows.append(found)
        start = stop
    return np.concatenate(rows, 1)


@torch.no_grad()
def transformers_logits(model: Any, ids: np.ndarray, mask: np.ndarray, sizes: list[int]) -> np.ndarray:
    """Over the same pieces: longrope's choice of frequencies depends on them."""
    positions = np.maximum(np.cumsum(mask, 1) - 1, 0)
    cache, rows, start = None, [], 0
    for size in sizes:
        stop = start + size
        output = model(
            torch.tensor(ids[:, start:stop]), attention_mask=torch.tensor(mask[:, :stop]),
            position_ids=torch.tensor(positions[:, start:stop]), past_key_values=cache, use_cache=True,
        )  # fmt: skip
        cache = output.past_key_values
        rows.append(output.logits.numpy())
        start = stop
    return np.concatenate(rows, 1)


def padded(lengths: list[int], left: bool) -> tuple[np.ndarray, np.ndarray]:
    """The first tokens of IDS, so many of them, and the mask."""
    ids, mask = np.zeros((len(lengths), 40), int), np.zeros((len(lengths), 40), int)
    for row, length in enumerate(lengths):
        place = slice(40 - length, 40) if left else slice(0, length)
        ids[row, place], mask[row, place] = IDS[:length], 1
    return ids, mask


@pytest.mark.parametrize("case", CASES)
def test_every_family_has_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    model = make_decoder(tmp_path / "model", case)
    runtime = onnx_runtime.open_model(export(tmp_path / "model"))
    ids, whole = IDS[None], np.ones((1, 40), int)
    for sizes in ([40], [13, 1, 20, 6], [1] * 40):
        wanted = transformers_logits(model, ids, whole, sizes)
        assert difference(in_pieces(runtime, ids, whole, sizes), wanted) < TOLERANCE
    ids, mask = padded([40, 23, 1], left=True)
    for sizes in ([40], [37, 1, 1, 1]):
        wanted = transformers_logits(model, ids, mask, sizes)
        found = in_pieces(runtime, ids, mask, sizes)
        assert np.isfinite(found).all()
        assert difference(found[mask == 1], wanted[mask == 1]) < TOLERANCE


def test_the_cases_cover_every_family() -> None:
    assert {kind for kind, _ in CASES.values()} == set(FAMILIES)


def test_padding_on_the_right_and_tokens_after_it(tmp_path: Path) -> None:
    """As onnxruntime-genai pads a batch of prompts."""
    model = make_decoder(tmp_path / "model", PLAIN)
    runtime = onnx_runtime.open_model(export(tmp_path / "model"))
    ids, mask = padded([30, 11], left=False)
    ids[:, 30:], mask[:, 30:] = IDS[30:], 1
    found = in_pieces(runtime, ids, mask, [30] + [1] * 10)
    for row, length in enumerate((30, 11)):
        text = np.concatenate([IDS[:length], IDS[30:]])[None]
        wanted = transformers_logits(model, text, np.ones_like(text), [text.shape[1]])[0]
        assert difference(found[row][mask[row] == 1], wanted) < TOLERANCE


def test_fp16_is_near_and_half_the_size(tmp_path: Path) -> None:
    model = make_decoder(tmp_path / "model", "gemma2: soft caps, window")
    half, whole = export(tmp_path / "model", "fp16"), export(tmp_path / "model")
    runtime = onnx_runtime.open_model(half)
    wanted = transformers_logits(model, IDS[None], np.ones((1, 40), int), [40])[0]
    found = runtime.logits(IDS.tolist())
    assert found is not None and found.dtype == np.float32
    assert 1e-5 < difference(found, wanted) < 2e-2  # a CPU with fp16 arithmetic sums in fp16, too
    sizes = [(folder / "model.onnx.data").stat().st_size for folder in (half, whole)]
    assert sizes[0] < 0.55 * sizes[1]


@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8), ("int4", 4)])
@pytest.mark.parametrize("case", [PLAIN, "glm4: interleaved, four norms"])
def test_a_quantized_graph_is_the_model_with_rounded_weights(
    case: str, quantization: str, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embedding and head are int8. To the last digits where activations are not rounded too."""
    model = make_decoder(tmp_path / "model", case)
    rounding = onnx_runtime.open_model(export(tmp_path / "model", quantization)).logits(IDS.tolist())
    monkeypatch.setattr(stored_weights, "_ACCURACY_LEVELS", {})
    (tmp_path / f"model-{quantization}").rename(tmp_path / "rounding")
    runtime = onnx_runtime.open_model(export(tmp_path / "model", quantization))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                edge = "embed" in name or "lm_head" in name
                weight.copy_(dequantized(weight.detach(), 8 if edge else bits))
    wanted = transformers_logits(model, IDS[None], np.ones((1, 40), int), [40])[0]
    found = runtime.logits(IDS.tolist())
    assert found is not None and rounding is not None
    assert difference(found, wanted) < TOLERANCE
    assert difference(rounding, wanted) < 0.05


def dequantized(weight: torch.Tensor, bits: int) -> torch.Tensor:
    values, scales, *packed = quantize_rows(weight, bits)
    if bits == 8:
        plain, zero = values.float(), torch.full_like(scales, 128.0)
    else:
        zeros = packed[0]
        plain = torch.stack([values & 15, values >> 4], -1).flatten(-2).float()
        zero = torch.stack([zeros & 15, zeros >> 4], -1).flatten(-2).float()[:, : scales.shape[1]]
    return ((plain - zero[..., None]) * scales[..., None]).flatten(1)[:, : weight.shape[1]]


@pytest.mark.parametrize(("bits", "worst"), [(8, 0.5 / 127), (4, 0.51 * 2 / 15)])
def test_a_value_is_rounded_by_half_a_step_at_most(bits: int, worst: float) -> None:
    weight = torch.randn(5, 3 * BLOCK + 8)
    weight[0, :BLOCK] = 0  # no scale
    weight[1, :BLOCK] = 3.0  # all of one sign
    error = (dequantized(weight, bits) - weight).abs()
    limit = weight.abs().amax() * worst
    assert error.max() <= limit * 1.01
    assert error[0, :BLOCK].max() == 0


@pytest.mark.parametrize(("quantization", "most"), [("fp32", 0.0), ("fp16", 1e-3), ("int8", 0.01), ("int4", 0.12)])
@pytest.mark.parametrize("case", [PLAIN, "gemma2: soft caps, window", "glm4: interleaved, four norms"])
def test_the_weights_are_read_back_under_their_names(case: str, quantization: str, most: float, tmp_path: Path) -> None:
    make_decoder(tmp_path / "model", case)
    source = FolderWeights(tmp_path / "model")
    runtime = onnx_runtime.open_model(export(tmp_path / "model", quantization))
    found = dict(runtime.weights() or ())
    assert set(found) == set(source.names())
    errors = {name: relative_error(found[name].float(), source.load(name)) for name in found}
    assert max(errors.values()) <= most + 1e-6 * ("gemma" in case)  # Gemma's norms are stored plus one
    assert all(error < 1e-3 for name, error in errors.items() if source.load(name).ndim == 1)


def test_an_export_that_is_interrupted_goes_on_and_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_decoder(tmp_path / "model", PLAIN)
    wanted = {file.name: file.read_bytes() for file in export(tmp_path / "model", "int4").iterdir()}
    (tmp_path / "model-int4").rename(tmp_path / "first")
    real, loads = stored_weights._quantized_rows, []

    def interrupted(*arguments: Any) -> Any:
        loads.append(1)
        if len(loads) == 12:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(stored_weights, "_quantized_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export(tmp_path / "model", "int4")
    assert not (tmp_path / "model-int4").exists()
    found = {file.name: file.read_bytes() for file in export(tmp_path / "model", "int4").iterdir()}
    assert found == wanted


def test_greedy_stops_at_a_stop_token_and_at_the_context(tmp_path: Path) -> None:
    make_decoder(tmp_path / "model", PLAIN, max_position_embeddings=50)
    folder = export(tmp_path / "model")
    runtime = onnx_runtime.open_model(folder)
    long = runtime.greedy(IDS.tolist(), 64)
    assert long is not None
    assert len(long) == 10 or long[-1] == 2
    write_json(folder / "generation_config.json", {"eos_token_id": [long[3]]})
    stopped = onnx_runtime.open_model(folder).greedy(IDS.tolist(), 64)
    assert stopped == long[: long.index(long[3]) + 1]
    with pytest.raises(RunFailed, match=r"51 tokens is longer than the model's context of 50"):
        runtime.logits([5] * 51)


def test_greedy_is_the_argmax_of_the_whole_text(tmp_path: Path) -> None:
    make_decoder(tmp_path / "model", PLAIN)
    runtime = onnx_runtime.open_model(export(tmp_path / "model"))
    tokens = runtime.greedy([7], 12)
    rows = runtime.logits([7, *(tokens or [])])
    assert tokens and rows is not None
    assert [int(row.argmax()) for row in rows[: len(tokens)]] == tokens


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"model_type": "gpt2"}, r"not for the family “gpt2”; there are: llama, .*--to hf"),
        ({"hidden_act": "relu6"}, "relu6"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "RoPE of the type “dynamic”"),
        ({"num_attention_heads": "many"}, 'config.json: num_attention_heads is "many"'),
    ],
)
def test_what_the_graph_does_not_have_is_refused_in_a_line(changed: dict[str, Any], says: str, tmp_path: Path) -> None:
    make_decoder(tmp_path / "model", PLAIN)
    config = read_json_object(tmp_path / "model" / "config.json")
    write_json(tmp_path / "model" / "config.json", {**config, **changed})
    with pytest.raises(UserError, match=says) as caught:
        export(tmp_path / "model")
    assert "\n" not in str(caught.value)


def test_genai_config_names_the_graphs_inputs_and_all_stop_tokens(tmp_path: Path) -> None:
    make_decoder(tmp_path / "model", PLAIN)
    architecture = read_architecture(FolderWeights(tmp_path / "model"))
    found = genai_config(architecture, {"eos_token_id": [2, 9], "do_sample": True, "temperature": 0.6})
    runtime = onnx_runtime.open_model(export(tmp_path / "model"))
    names = {one.name for one in runtime._session.get_inputs()}
    inputs = found["model"]["decoder"]["inputs"]
    assert names == {
        "input_ids", "attention_mask",
        *(inputs[f"past_{kind}_names"] % layer for kind in ("key", "value") for layer in (0, 1)),
    }  # fmt: skip
    assert found["model"]["eos_token_id"] == [2, 9]
    assert found["model"]["context_length"] == found["search"]["max_length"] == 128
    assert (found["search"]["do_sample"], found["search"]["temperature"]) == (True, 0.6)


def test_a_vision_tower_is_left_out(tmp_path: Path) -> None:
    """As in Gemma 3 with images: the decoder's weights have a longer prefix."""
    from safetensors.torch import load_file, save_file

    model = make_decoder(tmp_path / "model", "gemma3: two RoPEs, soft cap, window")
    folder = tmp_path / "model"
    weights = {
        name.replace("model.", "model.language_model."): value
        for name, value in load_file(folder / "model.safetensors").items()
    }
    save_file({**weights, "model.vision_tower.patch.weight": torch.ones(3, 3)}, folder / "model.safetensors")
    config = read_json_object(folder / "config.json")
    write_json(folder / "config.json", {"model_type": "gemma3", "text_config": config, "tie_word_embeddings": True})
    runtime = onnx_runtime.open_model(export(folder))
    wanted = transformers_logits(model, IDS[None], np.ones((1, 40), int), [40])[0]
    found = runtime.logits(IDS.tolist())
    assert found is not None
    assert difference(found, wanted) < TOLERANCE
