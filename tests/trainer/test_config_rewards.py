"""`rewards.<domain>`: what each scorer reads, where the judge may run, and that no key leaks."""

import pytest

from tests.trainer.config_bench import ACTOR, ROLLOUT, command, errors, load
from trainer.build import _domains, _scorers
from trainer.config.schema import domain_leaves
from trainer.config.schema_reward import SCORER_FIELDS
from trainer.main import main
from trainer.reward.spec import SCORED_DOMAINS, check_options

SEPARATE = ("actor_rollout_ref.hybrid_engine=False", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=4")
JUDGE = ("rewards.llm_judge.api_base=http://judge:8000/v1", "rewards.llm_judge.model=qwen")


def test_options_reach_their_scorer(tmp_path):
    config = load(
        tmp_path,
        *JUDGE,
        "rewards.llm_judge.max_retries=5",
        "rewards.math_rule.answer=last_number",
        "rewards.ifeval.reward=fraction",
        "rewards.ifeval.timeout_s=3",
        "rewards.crossthinkqa.reward_type=soft",
        "rewards.choice.repetition_penalty=True",
    ).config
    domains = _domains(config)
    assert domains["math_rule"].options == {"answer": "last_number", "require_box": False}
    assert domains["ifeval"].options == {"reward": "fraction", "keyword_match": "word"}
    assert domains["crossthinkqa"].options == {"reward_type": "soft", "repetition_penalty": False}
    assert domains["choice"].options == {"reward_type": "binary", "repetition_penalty": True}
    judge = domains["llm_judge"].options
    assert (judge["api_base"], judge["model"], judge["max_retries"]) == ("http://judge:8000/v1", "qwen", 5)
    assert (domains["llm_judge"].timeout_s, domains["math_rule"].timeout_s, domains["ifeval"].timeout_s) == (60, 10, 3)
    for name, spec in domains.items():
        check_options(name, spec.options)


def test_the_tables_name_fields_and_domains_that_exist():
    assert set(SCORER_FIELDS) <= set(SCORED_DOMAINS)
    assert {field for fields in SCORER_FIELDS.values() for field in fields} <= set(domain_leaves())


def test_rows_of_the_judge_are_read_only_where_it_is_configured(tmp_path):
    assert "llm_judge" not in _scorers(load(tmp_path).config)["scorers"]
    assert "ifeval" in _scorers(load(tmp_path).config)["scorers"]
    assert "llm_judge" in _scorers(load(tmp_path, *JUDGE).config)["scorers"]


@pytest.mark.parametrize(
    ("argument", "owner"),
    [
        ("rewards.ifeval.answer=last_number", "rewards.math_rule"),
        ("rewards.math_rule.reward=fraction", "rewards.ifeval"),
        ("rewards.math_rule.reward_type=soft", "rewards.crossthinkqa, rewards.choice"),
        ("rewards.choice.api_base=http://x", "rewards.llm_judge"),
        ("rewards.choice.devices=[1]", "rewards.llm_judge"),
    ],
)
def test_a_field_is_refused_where_nobody_reads_it(tmp_path, argument, owner):
    text = errors(tmp_path, argument)["reward.unread"]
    assert "which does not read it" in text and f"it in {owner} only" in text and "do this:  remove it" in text


def test_a_complete_section_at_its_defaults_passes(tmp_path):
    load(tmp_path, "rewards.ifeval.answer=rules", "rewards.ifeval.api_base=null", "rewards.ifeval.max_tokens=512")


def test_the_judge_has_no_processes(tmp_path):
    text = errors(tmp_path, *JUDGE, "rewards.llm_judge.world_size=4")["reward.unread"]
    assert "max_concurrency: the judge has no processes" in text


@pytest.mark.parametrize(
    ("arguments", "id", "part"),
    [
        (["rewards.llm_judge.tag_included=[a]"], "reward.judge", "no value"),
        ([JUDGE[0]], "reward.judge", "rewards.llm_judge.model=NAME"),
        ([*JUDGE, "rewards.llm_judge.api_base=judge:8000"], "reward.judge", "expected: a URL"),
        ([*JUDGE, "rewards.llm_judge.prompt_path=/none.txt"], "reward.file", "/none.txt: no such file"),
        ([*JUDGE, "rewards.llm_judge.max_concurrency=0"], "value.range", "max_concurrency=0"),
        ([*JUDGE, "rewards.llm_judge.max_retries=-1"], "value.range", "0 or more"),
        ([*JUDGE, "rewards.llm_judge.on_failure=skip"], "value.choice", "one of mask, stop"),
        (["rewards.ifeval.timeout_s=0"], "value.range", "more than 0"),
        (["rewards.ifeval.score_map=[1]"], "value.range", "two numbers"),
        (["rewards.choice.reward_type=soft", "rewards.choice.score_map=[-1,1]"], "reward.map", "both set the scores"),
    ],
)
def test_bad_settings_are_refused(tmp_path, arguments, id, part):
    assert part in errors(tmp_path, *arguments)[id]


def test_a_function_of_ones_own_needs_no_endpoint(tmp_path):
    own = tmp_path / "own.py"
    own.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1\n")
    load(tmp_path, f"reward.custom_reward_function.path={own}", "rewards.llm_judge.tag_included=[a]")


@pytest.mark.parametrize(
    ("layout", "devices", "message"),
    [
        (["trainer.n_gpus_per_node=8"], "[4,5]", "overlap actor, rollout devices [0-7]"),
        (["trainer.n_gpus_per_node=1"], "[0]", "overlap actor, rollout devices [0]"),
        (
            ["trainer.n_gpus_per_node=4", *SEPARATE],
            "[4,5]",
            "overlap rollout devices [4-7]",
        ),
        (
            ["trainer.n_gpus_per_node=4", f"{ACTOR}.use_kl_loss=True"],
            "[3]",
            "overlap actor, rollout, reference devices [0-3]",
        ),
    ],
)
def test_a_judge_needs_devices_of_its_own(tmp_path, layout, devices, message):
    text = errors(tmp_path, *JUDGE, *layout, f"rewards.llm_judge.devices={devices}")["reward.devices"]
    assert f"llm_judge devices {devices.replace(',', ', ')} {message}" in text and "give the judge its own" in text


def test_free_devices_pass(tmp_path):
    config = load(tmp_path, *JUDGE, "trainer.n_gpus_per_node=4", "rewards.llm_judge.devices=[4,5]").config
    assert config.rewards["llm_judge"].devices == (4, 5)


@pytest.mark.parametrize("argument", ["api_key_env=sk-live-12345", "api_base=http://user:sk-live-12345@judge/v1"])
def test_a_key_in_the_configuration_is_refused_and_not_repeated(tmp_path, argument, capsys):
    text = errors(tmp_path, *JUDGE, f"rewards.llm_judge.{argument}")["reward.secret"]
    assert "sk-live" not in text
    assert main([*command(tmp_path, *JUDGE, f"rewards.llm_judge.{argument}"), "--dry-run"]) == 2
    shown = capsys.readouterr()
    assert "sk-live" not in shown.out + shown.err
