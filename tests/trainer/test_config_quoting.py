"""What a bash word becomes: Hydra's grammar, and the rules on top of it. Bash quotes are already gone here."""

import string

import pytest

from tests.trainer.config_bench import problem, value, values
from trainer.config.commandline import parse_item
from trainer.config.values import to_text

TEXT, OPEN = "trainer.experiment_name", "actor_rollout_ref.model.override_config.x"
INT, FLOAT, BOOL = "trainer.save_freq", "actor_rollout_ref.actor.optim.lr", "data.shuffle"
LAYOUT = "actor_rollout_ref.actor.megatron.override_transformer_config.pipeline_model_parallel_layout"
CORRECTION = "algorithm.rollout_correction"
VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"


@pytest.mark.parametrize("text", ["/a/b:c-d_e.f", "a@b%c+d", "a*b", "a|b", "$X?", "a b"])
def test_plain_text_needs_no_hydra_quotes(text):
    assert value(f"{TEXT}={text}") == text
    assert value(f"{TEXT}= {text} ") == text  # outer blanks are stripped


@pytest.mark.parametrize("written", ['"a=b"', "'a=b'", r"a\=b"])
def test_equal_sign_needs_hydra_quotes_or_a_backslash(written):
    assert value(f"{TEXT}={written}") == "a=b"


@pytest.mark.parametrize("character", [*"=,{}[]()#~&;<>!^'\"`", "中"])
def test_special_characters_fail_bare_and_work_inside_quotes(character):
    text = f"a{character}b"
    assert "ConfigError[arg.syntax]" in problem(f"{TEXT}={text}")
    assert value(f"{TEXT}={to_text(text)}") == text


def test_quotes_inside_a_value():
    assert value(f'{TEXT}="it\'s"') == "it's"
    assert value(f'{TEXT}="say \\"hi\\""') == 'say "hi"'


def test_lists():
    key = "trainer.resume_allow_changes"
    assert value(f"{key}=[a,b]") == ("a", "b")
    assert value(f"{key}=[ a, b ]") == ("a", "b")
    assert value(f"{key}=[]") == ()
    assert value('trainer.logger=["console","csv"]') == ("console", "csv")
    assert value("trainer.logger=['console','csv']") == ("console", "csv")
    assert value("trainer.logger=console") == value("trainer.logger=[console]") == ("console",)
    assert value('data.train_files=["/d/a=1.parquet",b]') == ("/d/a=1.parquet", "b")
    assert value("actor_rollout_ref.rollout.cudagraph_capture_sizes=[2, 4, 8]") == (2, 4, 8)
    assert "write trainer.logger=[a,b]" in problem("trainer.logger=a,b")
    assert "arg.syntax" in problem("trainer.logger=[a,b,]")


def test_null_none_and_empty_text():
    assert value("trainer.total_training_steps=null") is None
    for key in (TEXT, OPEN, "trainer.total_training_steps"):
        assert "`None` is only text" in problem(f"{key}=None")
    assert "`None` is only text" in problem(f"{OPEN}=[a,None]")
    assert value(f"{TEXT}=") == value(f'{TEXT}=""') == ""
    assert "value.type" in problem(f"{INT}=")
    assert "null is not allowed" in problem(f"{INT}=null")


def test_threshold_pairs_are_text_even_where_hydra_sees_a_number():
    assert value(f"{CORRECTION}.rollout_is_threshold=0.5_2") == "0.5_2"
    assert value(f'{CORRECTION}.rollout_is_threshold="0.5_2"') == "0.5_2"
    assert value(f"{CORRECTION}.rollout_is_threshold=0.5_2.0") == "0.5_2.0"
    assert value(f"{CORRECTION}.rollout_rs_threshold=1_2") == "1_2"
    assert value(f"{CORRECTION}.rollout_is_threshold=2") == 2.0


@pytest.mark.parametrize(
    "text",
    [
        string.printable.replace("\n", "").replace("\r", ""),
        *string.punctuation,
        "  outer blanks ",
        "中文 路径",
        "\\",
        '\\"',
        '\\\\"x\\',
        "C:\\dir\\",
        "0.5_2",
        "null",
        "true",
        "1e-6",
        "",
    ],
)
def test_to_text_round_trips(text):
    for argument, expected in (
        (to_text(text), text),
        (to_text([text, "b"]), [text, "b"]),
        (to_text({"k": text}), {"k": text}),
    ):
        item = parse_item(f"k={argument}", 1, "argv 1", found := [])
        assert found == [] and item.value == expected


def test_to_text_refuses_a_newline():
    with pytest.raises(ValueError, match="line break"):
        to_text("a\nb")


@pytest.mark.parametrize(("text", "number"), [("1e-6", 1e-6), ("1.0e-06", 1e-6), (".5", 0.5), ("1", 1.0)])
def test_float_keys(text, number):
    found = value(f"{FLOAT}={text}")
    assert found == number and isinstance(found, float)


def test_int_keys_and_numbers_that_are_none():
    assert (value(f"{INT}=8"), value(f"{INT}=+8"), value(f"{INT}=1_000")) == (8, 8, 1000)
    for text in ("8.0", "1e3", "0x10", "True"):
        assert "a whole number" in problem(f"{INT}={text}")
    for key in (FLOAT, OPEN):
        for text in ("nan", "inf", "-inf", "1e400"):
            assert "a finite number" in problem(f"{key}={text}")
    assert value(f"{TEXT}=1e-6") == "1e-06"
    assert value(f"{TEXT}=true") == "True"
    assert value(f"{TEXT}=007") == "007"
    assert value(f'{TEXT}="1e-6"') == "1e-6"


def test_bool_keys_and_passthrough_text():
    assert all(value(f"{BOOL}={text}") is True for text in ("True", "true", "on", "yes", "1"))
    assert all(value(f"{BOOL}={text}") is False for text in ("False", "off", "no", "0"))
    assert "True or False" in problem(f"{BOOL}=2")
    assert value(f"{OPEN}=True") is True
    assert value(f"{OPEN}=yes") == "yes"
    assert value(f"{OPEN}=on") == "on"


def test_dicts():
    assert value(f"+{OPEN}={{a:1,b:[1,2]}}") == {"a": 1, "b": [1, 2]}
    assert "arg.syntax" in problem(f'{OPEN}={{"a":1}}')
    assert value("data.apply_chat_template_kwargs={a:1}") == {"a": 1}  # an empty dict node, plain key
    found, problems = values(f"{OPEN}={{a:1}}", f"{OPEN}.b=2")
    assert problems == [] and found[OPEN[:-2]] == {"x": {"a": 1, "b": 2}}


def test_interpolation(monkeypatch):
    monkeypatch.setenv("CONFIG_TEST_HOME", "/home/x")
    monkeypatch.setenv("CONFIG_TEST_STEPS", "12")
    monkeypatch.delenv("CONFIG_TEST_NOPE", raising=False)
    assert value(f"{TEXT}=${{oc.env:CONFIG_TEST_HOME}}/m") == "/home/x/m"
    assert value(f"{TEXT}=${{oc.env:CONFIG_TEST_NOPE,dflt}}") == "dflt"
    assert value(f"{INT}=${{data.train_batch_size}}") == 1024
    assert value(f"{INT}=${{oc.env:CONFIG_TEST_STEPS}}") == 12
    message = problem(f"{TEXT}=${{oc.env:CONFIG_TEST_NOPE}}")
    assert TEXT in message and "CONFIG_TEST_NOPE" in message and "value.interpolation" in message


def test_spellings_of_public_recipes():
    found, problems = values(
        "model_engine=megatron",
        f'+{VLLM}.compilation_config.cudagraph_mode="FULL_DECODE_ONLY"',
        f"++{VLLM}.additional_config.enable_cpu_binding=True",
        'actor_rollout_ref.actor.router_replay.mode="R3"',
        f"{LAYOUT}='Et*6|t*6L'",
        f"{CORRECTION}.rollout_rs='token_k1,seq_max_k2'",
        '+actor_rollout_ref.model.override_config.patterns=["lm_head","re:.*mlp.gate$"]',
    )
    assert problems == []
    assert found[VLLM] == {
        "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"},
        "additional_config": {"enable_cpu_binding": True},
    }
    assert found["actor_rollout_ref.actor.router_replay.mode"] == "R3"
    section, _, leaf = LAYOUT.rpartition(".")
    assert found[section][leaf] == "Et*6|t*6L"
    assert found[f"{CORRECTION}.rollout_rs"] == "token_k1,seq_max_k2"
    assert found["actor_rollout_ref.model.override_config"]["patterns"] == ["lm_head", "re:.*mlp.gate$"]


@pytest.mark.parametrize(
    "argument", ["k=choice(a,b)", "k=range(1,3)", "k=f(x)", "k=int(3)", "key", "--foo=1", "k=[a", "k@p=1"]
)
def test_what_is_no_override_is_refused_with_its_position(argument):
    found, problems = values("data.seed=1", argument)
    assert len(problems) == 1
    assert problems[0].startswith("ConfigError[arg.syntax]") and "(argument 2)" in problems[0]
    assert found["data.seed"] == 1
