"""Options from flags, environment and file: precedence, types, and errors that name their source."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.config import EngineConfig, all_options
from headrace.core.errors import ConfigError
from headrace.core.settings import OTHER_VARIABLES, flag_of, resolve_options, variable_of

# A new option, or one that is renamed, is a change of the interface: it is reviewed here.
FLAGS = (
    "revision dtype quantize max_model_len load_format allow_pickle offline chat_template lora device threads "
    "tensor_parallel_size kv_memory kv_dtype prefix_caching max_num_seqs max_num_batched_tokens speculative seed "
    "host port api_key api_key_file served_model_name tls_cert tls_key cors_origins ui log_level "
    "log_format"
).split()
NO_FLAGS = (
    "model trust_remote_code pooling images tokenizer skip_tokenizer_init max_loras max_lora_rank op_providers "
    "block_size hash_seed image_cache_tokens policy max_queue_requests max_queue_tokens request_timeout_s "
    "drain_timeout_s max_body_bytes allow_remote_media allow_private_media load_loras max_images max_image_bytes "
    "max_image_pixels max_stored_responses max_stored_bytes otlp_endpoint ping_interval_s stall_timeout_s "
    "stall_restart_s send_timeout_s"
).split()


def test_frozen_list_of_options() -> None:
    options = all_options()
    assert [name for name, (_, field) in options.items() if field.metadata["cli"]] == FLAGS
    assert [name for name, (_, field) in options.items() if not field.metadata["cli"]] == NO_FLAGS
    assert len(FLAGS) <= 30


def test_every_option_says_what_it_means() -> None:
    for name, (_, field) in all_options().items():
        assert field.metadata["help"], name
        assert variable_of(name) not in OTHER_VARIABLES
        assert re.fullmatch(r"--[a-z]+(-[a-z]+)*", flag_of(name))


def test_nothing_given_is_the_default() -> None:
    assert resolve_options({}, environ={}) == EngineConfig()
    assert resolve_options({name: None for name in all_options()}, environ={"PATH": "/bin"}) == EngineConfig()


@given(
    flag=st.none() | st.integers(1, 99), variable=st.none() | st.integers(1, 99), key=st.none() | st.integers(1, 99)
)
def test_precedence(
    tmp_path_factory: pytest.TempPathFactory, flag: int | None, variable: int | None, key: int | None
) -> None:
    file = tmp_path_factory.getbasetemp() / "precedence.toml"
    file.write_text("" if key is None else f"max-num-seqs = {key}\n")
    environ = {} if variable is None else {"HEADRACE_MAX_NUM_SEQS": str(variable)}
    config = resolve_options({"max_num_seqs": None if flag is None else str(flag)}, config_file=file, environ=environ)
    given_values = [value for value in (flag, variable, key) if value is not None]
    assert config.scheduler.max_num_seqs == (given_values[0] if given_values else 64)


def test_file_takes_dashes_and_underscores_and_all_types(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text(
        'model = "org/name"\nmax-model-len = 4096\nthreads = "auto"\nprefix_caching = false\nkv-memory = "2GiB"\n'
    )
    config = resolve_options({}, config_file=file, environ={})
    assert config.model.model == "org/name"
    assert config.model.max_model_len == 4096
    assert config.device.threads == "auto"
    assert config.kv.prefix_caching is False
    assert config.kv.kv_memory == "2GiB"


def test_file_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text("seed = 7")
    assert resolve_options({}, environ={"HEADRACE_CONFIG": str(file)}).scheduler.seed == 7


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("no", False), ("Off", False)]
)
def test_booleans_in_the_environment(text: str, value: bool) -> None:
    assert resolve_options({}, environ={"HEADRACE_OFFLINE": text}).model.offline is value


def test_an_empty_variable_is_not_set() -> None:
    assert resolve_options({}, environ={"HEADRACE_MAX_NUM_SEQS": "", "HEADRACE_CONFIG": ""}) == EngineConfig()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("max-model-length = 5", ["'max-model-length'", "did you mean max-model-len"]),
        ("max_model_lenn = 5", ["'max_model_lenn'", "did you mean max_model_len"]),
        ('max-num-seqs = "5"', ["max-num-seqs must be a number, without quotes", "'5'"]),
        ("max-num-seqs = 2.5", ["max-num-seqs must be a number", "2.5"]),
        ("max-num-seqs = true", ["max-num-seqs must be a number", "True"]),
        ('max-num-seqs = "auto"', ["max-num-seqs must be a number", "'auto'"]),
        ("max-num-seqs = 0", ["max-num-seqs must be a positive number", "0"]),
        ("kv-memory = 5", ["kv-memory must be text", "5"]),
        ('kv-memory = "5 parsecs"', ["kv-memory must be a size", "'5 parsecs'"]),
        ('offline = "yes"', ["offline must be true or false, without quotes", "'yes'"]),
        ('dtype = "bfloat"', ["dtype must be one of", "'bfloat'", "did you mean bfloat16"]),
        ("block-size = 24", ["block-size must be a power of two", "24"]),
        ("[scheduler]\nseed = 1", ["[scheduler] is a table", "flat keys"]),
        ("[seed]\nx = 1", ["seed must be a number"]),
        ("max-num-seqs = 5\nmax_num_seqs = 6", ["max_num_seqs stands there twice"]),
        ("seed = ", ["is not valid TOML"]),
    ],
)
def test_errors_in_a_file_name_it(tmp_path: Path, text: str, parts: list[str]) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        resolve_options({}, config_file=file, environ={})
    for part in [str(file), *parts]:
        assert part in error.value.reason


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*nothing.toml: No such file"):
        resolve_options({}, config_file=tmp_path / "nothing.toml", environ={})
    (tmp_path / "latin.toml").write_bytes(b'model = "\xe4"')
    with pytest.raises(ConfigError, match=r"latin.toml is not UTF-8 at byte 9"):
        resolve_options({}, config_file=tmp_path / "latin.toml", environ={})


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"HEADRACE_MAX_NUM_SEQS": "many"}, "HEADRACE_MAX_NUM_SEQS must be a number, got 'many'"),
        ({"HEADRACE_OFFLINE": "maybe"}, "HEADRACE_OFFLINE must be one of 1, true, yes, on, 0, false, no, off"),
        ({"HEADRACE_MAX_MODEL_LEN": "long"}, "HEADRACE_MAX_MODEL_LEN must be a number or auto, got 'long'"),
        ({"HEADRACE_DTYPE": "int3"}, "HEADRACE_DTYPE must be one of auto, float32"),
        ({"HEADRACE_KV_MEMORY": "0"}, "HEADRACE_KV_MEMORY must be a size such as 8GiB"),
        ({"HEADRACE_MAX_MODEL_LENGTH": "5"}, "did you mean HEADRACE_MAX_MODEL_LEN?"),
        ({"HEADRACE_CACHES": "x"}, "did you mean HEADRACE_CACHE?"),
    ],
)
def test_errors_in_the_environment_name_the_variable(environ: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_options({}, environ=environ)
    assert reason in error.value.reason


@pytest.mark.parametrize("variable", [*OTHER_VARIABLES, "HEADRACE_ACME_TURBO_MODE", "HEADRACEX", "OTHER"])
def test_variables_that_are_no_options_are_left_alone(variable: str, tmp_path: Path) -> None:
    file = tmp_path / "empty.toml"
    file.write_text("")
    assert resolve_options({}, environ={variable: str(file)}) == EngineConfig()


def test_errors_in_flags_name_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"--max-num-seqs must be a number, got 'x'"):
        resolve_options({"max_num_seqs": "x"}, environ={})
    with pytest.raises(ConfigError, match=r"--load-format must be one of auto, dummy; got 'lifo'"):
        resolve_options({"load_format": "lifo"}, environ={})
    with pytest.raises(ConfigError, match=r"unknown option 'max_seqs'; did you mean max_num_seqs"):
        resolve_options({"max_seqs": 1}, environ={})


def test_flags_may_be_typed_values() -> None:
    config = resolve_options({"max_num_seqs": 3, "offline": True, "threads": "2"}, environ={})
    assert (config.scheduler.max_num_seqs, config.model.offline, config.device.threads) == (3, True, 2)
