"""Chat templates: names, files, one per tag, the default system text; decoding."""

import pytest

from tests.trainer.prompt_bench import ENCODER, OVERHEAD, TOKENIZER, byte_tokenizer, rows_of
from trainer.config.checks_data import TEMPLATES
from trainer.prompts import Message, PromptEncoder, PromptSource, load_tokenizer
from trainer.prompts.chat_templates import CHAT_TEMPLATES, read_template
from trainer.prompts.report import build_report


def test_one_beginning_of_sequence_and_special_tokens_as_single_ids():
    assert TOKENIZER("q")["input_ids"][0] == TOKENIZER.bos_token_id
    ids = ENCODER.encode((Message("user", "q"),))
    assert ENCODER.render(ids) == "<s><|user|>q<|end|><|assistant|>"
    assert ids.count(TOKENIZER.bos_token_id) == 1 and len(ids) == OVERHEAD + 1


def test_decoding_for_scorers_cuts_special_tokens_but_keeps_thinking_marks():
    ids = TOKENIZER("<think>a</think> b<|end|></s>", add_special_tokens=False)["input_ids"]
    assert "</s>" in ENCODER.render(ids)
    assert ENCODER.decode(ids) == "<think>a</think> b"


def test_template_arguments_and_own_template():
    thinking = PromptEncoder(TOKENIZER, {"thinking": True})
    ids = thinking.encode((Message("user", "q"),))
    assert thinking.render(ids).endswith("<|assistant|><think>") and thinking.opens_think(ids)
    assert not ENCODER.opens_think(ENCODER.encode((Message("user", "q"),)))
    own = PromptEncoder(TOKENIZER, custom_chat_template="{{ messages[-1].content }}!")
    assert own.render(own.encode((Message("user", "q"),))) == "q!"
    assert len({thinking.fingerprint, ENCODER.fingerprint, own.fingerprint}) == 3
    bare = byte_tokenizer()
    bare.chat_template = None
    with pytest.raises(ValueError, match="got a tokenizer without chat template"):
        PromptEncoder(bare)


def test_a_tokenizer_is_read_from_a_folder(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    assert PromptEncoder(load_tokenizer(str(tmp_path))).fingerprint == ENCODER.fingerprint
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ValueError, match=r"(?s)got no tokenizer from .*empty.*; expected a Hugging Face model directory"
    ):
        load_tokenizer(str(tmp_path / "empty"))


def rendered(encoder: PromptEncoder, *turns: tuple[str, str], tag: str = "") -> str:
    return encoder.render(encoder.encode([Message(*turn) for turn in turns], tag))


QWEN = "{% for m in messages %}{{ m.content }};{% endfor %}{{ 'think' if enable_thinking else 'answer' }}"


def qwen_tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = QWEN
    return tokenizer


def test_named_templates():
    for name in ("native", "qwen2_5"):
        assert rendered(PromptEncoder(qwen_tokenizer(), template=name), ("user", "q")) == "q;answer"
    assert rendered(PromptEncoder(qwen_tokenizer(), template="qwen3"), ("user", "q")) == "q;think"
    off = PromptEncoder(qwen_tokenizer(), {"enable_thinking": False}, template="qwen3")
    assert rendered(off, ("user", "q")) == "q;answer"
    chatml = PromptEncoder(qwen_tokenizer(), template="chatml")
    assert rendered(chatml, ("system", "s"), ("user", "q")) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    )


def test_unknown_names_and_switches_that_a_template_does_not_know(caplog):
    with pytest.raises(ValueError) as caught:
        PromptEncoder(TOKENIZER, template_by_tag={"t": "llama"})
    assert str(caught.value) == (
        "got data.template_by_tag.t=llama; expected one of native, qwen2_5, qwen3, chatml; rename it, or put the Jinja "
        "text into a file and set data.chat_template_path"
    )
    PromptEncoder(TOKENIZER, template="qwen3")
    assert "does not know enable_thinking" in caplog.text


def test_a_tokenizer_without_template_takes_chatml():
    bare = byte_tokenizer()
    bare.chat_template = None
    assert rendered(PromptEncoder(bare, template="chatml"), ("user", "q")).endswith("assistant\n")
    with pytest.raises(ValueError, match=r"set data\.template=chatml or data\.chat_template_path"):
        PromptEncoder(bare, template="chatml", template_by_tag={"t": "native"})


def test_each_tag_may_have_its_template():
    encoder = PromptEncoder(qwen_tokenizer(), template_by_tag={"hard": "qwen3"})
    assert rendered(encoder, ("user", "q"), tag="hard") == "q;think"
    assert rendered(encoder, ("user", "q"), tag="easy") == "q;answer"
    assert encoder.fingerprint != PromptEncoder(qwen_tokenizer(), template_by_tag={"easy": "qwen3"}).fingerprint
    rows = [*rows_of(1, tag="easy"), *rows_of(1, tag="hard")]
    prompts = PromptSource(rows, encoder, batch_size=2, shuffle=False, seed=1, max_prompt_length=64)
    assert [encoder.render(item.token_ids) for item in prompts.next_batch()] == ["q;answer", "q;think"]
    assert build_report(prompts)["examples"] == {"easy": "q;answer", "hard": "q;think"}


def test_the_default_system_text_is_for_rows_without_one():
    encoder = PromptEncoder(TOKENIZER, default_system="d")
    assert rendered(encoder, ("user", "q")) == "<s><|system|>d<|end|><|user|>q<|end|><|assistant|>"
    assert rendered(encoder, ("system", "own"), ("user", "q")) == (
        "<s><|system|>own<|end|><|user|>q<|end|><|assistant|>"
    )
    assert "system" not in rendered(ENCODER, ("user", "q"))
    assert encoder.fingerprint != ENCODER.fingerprint


def test_a_template_from_a_file(tmp_path):
    (tmp_path / "a.jinja").write_text("{{ messages[-1].content }}?", encoding="utf-8")
    assert read_template(tmp_path / "a.jinja") == "{{ messages[-1].content }}?"
    with pytest.raises(ValueError, match=r"got data\.chat_template_path=.*No such file.*; expected a readable UTF-8"):
        read_template(tmp_path / "b.jinja")
    (tmp_path / "c.jinja").write_text(" \n")
    with pytest.raises(ValueError, match=r"got an empty file data\.chat_template_path=.*; expected a Jinja template"):
        read_template(tmp_path / "c.jinja")


def test_the_fingerprint_sees_the_vocabulary_and_not_the_last_call():
    one, other = byte_tokenizer(), byte_tokenizer()
    before = PromptEncoder(one).fingerprint
    one("a long text", truncation=True, max_length=2)
    assert PromptEncoder(one).fingerprint == before
    other.add_tokens(["qq"])
    assert PromptEncoder(other).fingerprint != before


def test_the_configuration_knows_the_same_names():
    assert set(CHAT_TEMPLATES) == set(TEMPLATES)
