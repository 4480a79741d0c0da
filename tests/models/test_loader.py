"""Names become models: folders, shapes with random weights, and errors that say what was tried."""

import httpx
import pytest
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cbatch import LLM, SamplingParams
from cbatch.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from cbatch.models import loader
from cbatch.models.loader import load_model, load_tokenizer, shape_names
from tests.models.families import make_tiny
from tests.models.paged import generate_together


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny("llama", dtype=torch.bfloat16).save_pretrained(path)
    return path


def test_a_folder_loads_and_gives_the_tokens_of_the_module_that_was_saved(folder):
    model = load_model(folder, dtype="bfloat16", device="cpu")
    assert (model.dtype, model.name, model.vocab_size) == (torch.bfloat16, str(folder), 101)
    saved = dict(make_tiny("llama", dtype=torch.bfloat16).named_parameters())
    assert all(torch.equal(p, saved[name]) for name, p in model._module.named_parameters())
    assert len(generate_together(model, [[1, 2, 3]], 2)[0]) == 2


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", torch.float32), ("float16", torch.float16), (torch.bfloat16, torch.bfloat16)],
)
def test_auto_is_float32_on_the_cpu_whatever_the_checkpoint_says(folder, dtype, expected):
    assert load_model(folder, dtype=dtype).dtype == expected


def test_dummy_weights_of_a_seed_are_the_same_and_random_state_is_left_alone(folder):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two, other = (load_model(folder, load_format="dummy", seed=seed)._module for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    same = [torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True)]
    assert all(same)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, make_tiny("llama").lm_head.weight)


def test_dummy_weights_follow_the_config_and_computed_buffers_are_right(folder):
    made = load_model(folder, load_format="dummy")._module
    reference = make_tiny("llama")
    assert torch.equal(made.model.norm.weight, torch.ones(48))
    assert made.model.layers[0].mlp.up_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(made.model.rotary_emb.inv_freq, reference.model.rotary_emb.inv_freq)
    assert {p.device.type for p in made.parameters()} == {"cpu"}


def test_the_config_file_alone_is_enough_for_dummy_weights(folder):
    assert load_model(folder / "config.json", load_format="dummy").vocab_size == 101


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-8b", 8_030_261_248),
        ("llama-1b", 1_235_814_400),
        ("smollm2-shape", 134_515_008),
        ("gpt2-shape", 124_439_808),
        ("qwen3-8b", 8_190_735_360),
    ],
)
def test_the_shapes_that_ship_have_the_sizes_of_their_models(name, parameters):
    config = AutoConfig.from_pretrained(loader._find_config(name))
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in module.parameters()) == parameters
    assert config.dtype == torch.bfloat16


def test_every_shape_that_ships_is_tested_above():
    assert shape_names() == ("gpt2-shape", "llama-1b", "llama-8b", "qwen3-8b", "smollm2-shape")


def test_the_demo_alias_needs_only_its_config_for_dummy_weights():
    assert loader._find_config("smollm2-135m").endswith("smollm2-shape.json")


def test_a_shape_has_no_weights_and_no_tokenizer():
    with pytest.raises(ModelNotFoundError, match="load_format='dummy'"):
        load_model("llama-8b")
    assert load_tokenizer("llama-8b") is None


def test_what_is_not_there_is_named(tmp_path, folder):
    for path in ("./nowhere", str(tmp_path / "nowhere")):
        with pytest.raises(ModelNotFoundError, match="no model folder at"):
            load_model(path)
    with pytest.raises(ModelNotFoundError, match="a file, not a model folder, at"):
        load_model(folder / "config.json")
    with pytest.raises(ModelNotFoundError, match=f"no config .* tried the folder '{tmp_path}'"):
        load_model(tmp_path)
    with pytest.raises(ModelNotFoundError, match="no config"):
        load_model(tmp_path, load_format="dummy")
    with pytest.raises(ModelNotFoundError, match="no tokenizer"):
        load_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer_serves_token_ids_if_asked_to(folder):
    """It was refused, and nothing said how to serve it."""
    with pytest.raises(ModelNotFoundError, match="skip_tokenizer_init=True"):
        LLM(folder, num_blocks=8)
    with pytest.raises(ConfigError, match="skip_tokenizer_init is True, but a tokenizer is given"):
        LLM(folder, folder, skip_tokenizer_init=True)
    with LLM(folder, num_blocks=8, device="cpu", skip_tokenizer_init=True) as llm:
        answer = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0].outputs[0]
        assert (len(answer.token_ids), answer.text, llm.get_tokenizer()) == (2, "", None)


def test_an_empty_name_is_no_folder():
    """`Path("")` is ".", so the message was about the config of a model that nobody asked for."""
    for load in (load_model, load_tokenizer):
        for name in ("", " "):
            with pytest.raises(ModelNotFoundError, match="the name is empty"):
                load(name)


@pytest.mark.parametrize(
    ("answer", "local"),
    [
        (httpx.ConnectError("Name or service not known"), True),
        (httpx.ReadTimeout("too slow"), True),
        (OfflineModeIsEnabled(), True),
        (HfHubHTTPError("401", response=httpx.Response(401, request=httpx.Request("GET", "https://hub"))), False),
        (HFValidationError("no name"), False),
        (None, False),
    ],
    ids=repr,
)
def test_the_hub_is_asked_once_and_without_it_the_cache_alone_is_looked_at(monkeypatch, answer, local):
    """transformers asks for each file six times: a wrong name without a network took 23 s to fail."""
    calls = []

    def model_info(self, name, timeout):
        calls.append((name, timeout))
        if answer is not None:
            raise answer

    def from_pretrained(path, *, local_files_only, **options):
        calls.append(local_files_only)
        raise OSError("not there")

    monkeypatch.setattr(HfApi, "model_info", model_info)
    monkeypatch.setattr(AutoConfig, "from_pretrained", from_pretrained)
    with pytest.raises(ModelNotFoundError, match="not there"):
        load_model("some/model")
    assert calls == [("some/model", 5), local]


def test_a_folder_is_not_looked_for_on_the_hub(folder, monkeypatch):
    monkeypatch.setattr(HfApi, "model_info", None)
    load_model(folder)


def test_a_hub_name_that_cannot_be_reached_says_what_was_tried(monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("We couldn't connect to the hub")

    monkeypatch.setattr(loader, "_only_local", lambda path: True)
    monkeypatch.setattr(AutoConfig, "from_pretrained", offline)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", offline)
    with pytest.raises(ModelNotFoundError, match=r"hub repository 'some/model'.*couldn't connect"):
        load_model("some/model")
    with pytest.raises(ModelNotFoundError, match="hub repository 'some/model'"):
        load_tokenizer("some/model")


def test_pickled_weights_are_not_read(folder, tmp_path):
    """A pickle can run any code when it is loaded."""
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    torch.save(make_tiny("llama").state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelNotFoundError, match=r"no weights .* in safetensors"):
        load_model(tmp_path)


def test_a_config_of_another_kind_of_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "t5", "d_model": 16}')
    for load_format in ("auto", "dummy"):
        with pytest.raises(UnsupportedModelError, match=r"no causal language model .*T5Config"):
            load_model(tmp_path, load_format=load_format)


def test_options_out_of_range_are_refused(folder):
    with pytest.raises(ConfigError, match="dtype is 'int8', but must be one of auto, float32"):
        load_model(folder, dtype="int8")
    with pytest.raises(ConfigError, match="load_format='fast'"):
        load_model(folder, load_format="fast")
