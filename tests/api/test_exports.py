"""What `cbatch` hands out is exactly what is public, and handing out nothing costs nothing."""

import subprocess
import sys

import pytest

import cbatch

PUBLIC = {
    *("LLM", "AsyncLLM", "Engine", "EngineConfig", "RequestHandle"),
    *(
        "SamplingParams",
        "BeamSearchParams",
        "StructuredOutputsParams",
        "RequestOutputKind",
        "RequestOutput",
        "CompletionOutput",
        "Logprob",
        "RequestMetrics",
    ),
    *("CBatchError", "ConfigError", "InvalidRequestError", "PromptTooLongError", "DuplicateRequestError"),
    *("UnsupportedModelError", "ModelNotFoundError", "EngineClosedError", "EngineDeadError"),
    "EngineOverloadedError",
    "__version__",
}


def test_all_is_what_is_public():
    assert set(cbatch.__all__) == PUBLIC
    assert len(cbatch.__all__) == len(PUBLIC)
    assert set(cbatch.__all__) <= set(dir(cbatch))


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_loads(name):
    assert getattr(cbatch, name) is not None


def test_every_error_is_public():
    from cbatch import errors

    names = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert names <= PUBLIC


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = cbatch.Nothing


@pytest.mark.parametrize(
    "statement",
    [
        "import cbatch",
        "import cbatch; cbatch.__version__; cbatch.SamplingParams; cbatch.InvalidRequestError",
        "import cbatch.scheduler",
        "import cbatch.cli",
    ],
)
def test_import_brings_no_torch(statement):
    """A second saved for `cbatch --version`, and the scheduler stays usable where there is no torch."""
    code = f"{statement}; import sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
