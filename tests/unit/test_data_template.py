"""Targets: exactly the assistant's texts with their end markers, or the record is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.tiny import CHATML, save_tokenizer
from unisono.data.encode import Encoder, Overlong, Tokens, _quick_span
from unisono.data.records import Conversation, Message, Shape, Text
from unisono.data.template import ChatTemplate, load_tokenizer
from unisono.errors import DataError, ModelError

# Removes <t>..</t> from all but the last assistant turn.
TEMPLATE_B = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<bos>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 != ns.last and '</t>' in m.content %}"
    "{{ m.content.split('<t>')[0] + m.content.split('</t>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<eos>\n{% endfor %}"
)
# The end marker stands after the last turn only.
TEMPLATE_C = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '<eos>' if loop.last else '\n' }}{% endfor %}"
# The header of the next turn begins with a special token, and no turn but the last is closed.
TEMPLATE_D = "{% for m in messages %}<bos>{{ m.role }}: {{ m.content }}{% if loop.last %}<eos>{% endif %}{% endfor %}"
TRIMMING = "{% for m in messages %}<bos>{{ m.role }}\n{{ m.content | trim }}<eos>\n{% endfor %}"
# As reasoning models do it: the part before </think> is taken out of the content and put together anew.
REASONING = (
    "{% for m in messages %}<bos>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
    "{% if '</think>' in m.content %}"
    "{% set r = m.content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set c = m.content.split('</think>')[-1].lstrip('\n') %}"
    "<think>\n{{ r }}\n</think>\n\n{{ c }}"
    "{% else %}<think>\n\n</think>\n\n{{ m.content }}{% endif %}"
    "{% elif m.role == 'assistant' %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}<eos>\n{% endfor %}"
)
WORDS = [
    "hi",
    "assistant",
    "user",
    "\n",
    " ",
    "yes",
    "<t>",
    "</t>",
    "ä",
    "😀",
    "assistant\nyes",
    ":",
    ".",
    "user: hi",
    "Mark",
]
_tokenizers: dict[str | None, Any] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


def tokenizer_with(template: str | None, folder: Path) -> Any:
    from transformers import AutoTokenizer

    if template not in _tokenizers:
        place = folder / str(len(_tokenizers))
        _tokenizers[template] = AutoTokenizer.from_pretrained(save_tokenizer(place, chat_template=template))
    return _tokenizers[template]


def conversation(*contents: str, roles: Sequence[str] = ("user", "assistant") * 20, where: str = "a:1") -> Conversation:
    return Conversation(tuple(Message(role, text) for role, text in zip(roles, contents)), where)


def encode(tokenizer: Any, record: Conversation | Text, shape: Shape = "messages") -> Tokens:
    (answer,) = Encoder(tokenizer, shape, 100_000).encode([record])
    if isinstance(answer, DataError):
        raise answer
    assert isinstance(answer, tuple)
    (tokens,) = answer
    return tokens


def runs(tokenizer: Any, tokens: Tokens) -> list[str]:
    """Decode each unbroken run of targets."""
    borders = np.flatnonzero(np.diff(tokens.is_target)) + 1
    pieces = zip(np.split(tokens.ids, borders), np.split(tokens.is_target, borders))
    return [tokenizer.decode(ids.tolist()) for ids, flags in pieces if flags[0]]


def random_conversation(chance: random.Random, number: int) -> Conversation:
    messages = [Message("system", "Be brief.")] if chance.random() < 0.3 else []
    for _ in range(chance.randint(1, 6)):
        for role in ("user", "assistant"):
            text = "".join(chance.choices(WORDS, k=chance.randint(1, 5)))
            if role == "assistant" and not text.strip():
                text += "ok"
            if role == "assistant" and chance.random() < 0.15:
                text = f"<t>because</t>{text}"
            messages.append(Message(role, text))
    return Conversation(tuple(messages), f"data.jsonl:{number}")


def conversations_of_b19() -> list[Conversation]:
    chance = random.Random(19)
    return [random_conversation(chance, number) for number in range(1, 51)]


def _rewritten(answer: str) -> str:
    """Say in Python what template B does to an answer that is not the last."""
    return answer.split("<t>")[0] + answer.split("</t>")[-1] if "</t>" in answer else answer


@pytest.mark.parametrize("template", [CHATML, TEMPLATE_B, TEMPLATE_C, TEMPLATE_D], ids=["a", "b", "c", "d"])
def test_b19_targets_are_the_answers_with_their_end_marker(folder: Path, template: str) -> None:
    tokenizer = tokenizer_with(template, folder)
    refused = []
    for record in conversations_of_b19():
        answers = [message.content for message in record.messages if message.role == "assistant"]
        is_rewritten = template == TEMPLATE_B and any(_rewritten(x) != x for x in answers[:-1])
        try:
            tokens = encode(tokenizer, record)
        except DataError as error:
            # An unpaired </t> is left as it is, but not with the mark behind it: refused to be safe.
            is_tagged = any("</t>" in answer for answer in answers[:-1])
            refused.append((is_tagged, error.where == record.where))
            continue
        assert not is_rewritten
        closes_last_only = template in (TEMPLATE_C, TEMPLATE_D)
        markers = ["" if closes_last_only else "<eos>"] * (len(answers) - 1) + ["<eos>"]
        assert runs(tokenizer, tokens) == [answer + marker for answer, marker in zip(answers, markers)]
        assert tokens.num_open_answers == markers.count("")
        theirs = tokenizer.apply_chat_template([m.__dict__ for m in record.messages], return_dict=True)["input_ids"]
        assert tokens.ids.tolist() == theirs and tokens.ids.dtype == np.int32
    assert set(refused) <= {(True, True)}
    assert 0 < len(refused) < 50 if template == TEMPLATE_B else not refused


@pytest.mark.parametrize("content", ["a<t>x</t>", "<t>x</t>a"])
def test_b19_a_rewritten_turn_is_refused_even_if_the_rest_occurs_elsewhere(folder: Path, content: str) -> None:
    tokenizer = tokenizer_with(TEMPLATE_B, folder)
    with pytest.raises(DataError, match="chat template") as caught:
        encode(tokenizer, conversation("a", content, content, "yes", where="d.jsonl:4"))
    assert caught.value.where == "d.jsonl:4"


def test_b19_a_template_that_drops_or_doubles_an_answer_is_refused(folder: Path) -> None:
    dropping = (
        "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}<eos>{% endif %}{% endfor %}"
    )
    doubling = CHATML + "{{ messages[-1].content }}"
    for template in (dropping, doubling):
        with pytest.raises(DataError, match="exactly once"):
            encode(tokenizer_with(template, folder), conversation("a", "b", "c", "d"))


def test_b19_marks_inside_the_text_do_not_mislead(folder: Path) -> None:
    tokenizer = tokenizer_with(CHATML, folder)
    record = conversation("Unisono00001Mark", "Unisono00001Mark yes")
    assert runs(tokenizer, encode(tokenizer, record)) == ["Unisono00001Mark yes<eos>"]
    with pytest.raises(DataError):
        encode(tokenizer_with(TRIMMING, folder), conversation("a", "Unisono00001Mark yes "))
    assert runs(tokenizer, encode(tokenizer, conversation("Unisono", "Unisono00001"))) == ["Unisono00001<eos>"]


def test_conversation_that_ends_with_the_user(folder: Path) -> None:
    assert runs(*_both(folder, CHATML, conversation("a", "b", "c"))) == ["b<eos>"]
    with pytest.raises(DataError, match="no end marker"):
        encode(tokenizer_with(TEMPLATE_C, folder), conversation("a", "b", "c"))


def test_the_first_token_of_all_is_never_a_target(folder: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
    record = conversation("yes", "a", "no", roles=("assistant", "user", "assistant"))
    assert runs(*_both(folder, template, record)) == ["es<eos>", "no<eos>"]


def test_two_answers_in_a_row(folder: Path) -> None:
    record = conversation("a", "b", "b", roles=("user", "assistant", "assistant"))
    assert runs(*_both(folder, CHATML, record)) == ["b<eos>", "b<eos>"]


def _both(
    folder: Path, template: str | None, record: Conversation | Text, shape: Shape = "messages"
) -> tuple[Any, Tokens]:
    tokenizer = tokenizer_with(template, folder)
    return tokenizer, encode(tokenizer, record, shape)


@pytest.mark.parametrize(
    ("content", "learned"),
    [("yes", "yes"), (" yes \n", "yes"), ("\nyes", "yes"), ("yes\n\n", "yes"), ("a  b ", "a  b")],
)
def test_white_space_that_the_template_cuts_off_is_no_target(folder: Path, content: str, learned: str) -> None:
    assert runs(*_both(folder, TRIMMING, conversation("assistant\n yes ", content))) == [f"{learned}<eos>"]
    assert runs(*_both(folder, CHATML, conversation("assistant\n yes ", content))) == [f"{content}<eos>"]


def test_reasoning_is_learned_in_the_last_answer_and_refused_before(folder: Path) -> None:
    thought = "<think>\nmuch\n</think>\n\nyes"
    assert runs(*_both(folder, REASONING, conversation("a", "no", "c", thought))) == ["no<eos>", f"{thought}<eos>"]
    assert runs(*_both(folder, REASONING, conversation("a", "no"))) == ["no<eos>"]
    with pytest.raises(DataError, match="changes assistant message 2"):
        encode(tokenizer_with(REASONING, folder), conversation("a", thought, "c", "no"))


def test_a_generation_block_agrees(folder: Path) -> None:
    template = (
        "{% for m in messages %}<bos>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<eos>{% endgeneration %}{% else %}{{ m.content }}<eos>{% endif %}\n{% endfor %}"
    )
    tokenizer = tokenizer_with(template, folder)
    for record in conversations_of_b19()[:10]:
        chat = [message.__dict__ for message in record.messages]
        theirs = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        assert encode(tokenizer, record).is_target.tolist() == [bool(flag) for flag in theirs["assistant_masks"]]


@pytest.mark.parametrize(
    ("template", "marker"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }} <eos>{% endfor %}", " <eos>"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n### End\n{% endfor %}", "\n### End"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>\n{% endfor %}<pad>", "<eos>"),
    ],
)
def test_forms_of_the_end_marker(folder: Path, template: str, marker: str) -> None:
    found = runs(*_both(folder, template, conversation("a", "b", "c", "d")))
    assert found == [f"b{marker}", f"d{marker}"]


def test_a_template_without_end_marker_is_refused(folder: Path) -> None:
    for template in (
        "{% for m in messages %}<bos>{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}\n{% endfor %}",
    ):
        with pytest.raises(DataError, match=r"no end marker[\s\S]*hint"):
            encode(tokenizer_with(template, folder), conversation("a", "b", "c", "d"))


def test_what_the_template_raises_names_the_record(folder: Path) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
    record = conversation("a", "b", "c", roles=("system", "user", "assistant"), where="d.jsonl:9")
    with pytest.raises(DataError, match=r"d\.jsonl:9: .*no system role"):
        encode(tokenizer_with(template, folder), record)


@pytest.mark.parametrize("before", ["end.", "line\n", "space ", "😀", ""])
def test_b20_the_answer_is_found_whatever_stands_before_it(folder: Path, before: str) -> None:
    for shape, template in (("messages", CHATML), ("messages", TEMPLATE_C), ("prompt_completion", None)):
        tokenizer, tokens = _both(folder, template, conversation(before, "### Answer"), shape)  # type: ignore[arg-type]
        learned = runs(tokenizer, tokens)
        if template is None and not before:
            assert learned == ["## Answer<eos>"]  # the first token of all is never predicted
        else:
            assert learned == ["### Answer<eos>"]


@pytest.mark.parametrize("template", [CHATML, None])
def test_b21_the_end_of_each_answer_is_a_target_even_if_padding_equals_it(tmp_path: Path, template: str | None) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(save_tokenizer(tmp_path / "e", pad_is_eos=True, chat_template=template))
    shape: Shape = "messages" if template else "prompt_completion"
    records = [conversation("q" * (i + 1), "answer" * (i + 1)) for i in range(8)]
    answers = Encoder(tokenizer, shape, 1000).encode(records)
    ends = [(tokens.ids[tokens.is_target] == 257).sum() for (tokens,) in answers]  # type: ignore[misc]
    assert ends == [1] * 8


def _tokenizer_with_merges(place: Path, template: str | None, *merges: tuple[str, str]) -> Any:
    """Give the byte tokenizer tokens of two characters (Ġ is a space, Ċ a newline)."""
    from transformers import AutoTokenizer

    save_tokenizer(place, chat_template=template)
    file = place / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["model"]["vocab"] |= {"<bos>": 256, "<eos>": 257, "<pad>": 258}
    for number, (left, right) in enumerate(merges):
        content["model"]["vocab"][left + right] = 259 + number
        content["model"]["merges"].append([left, right])
    file.write_text(json.dumps(content), encoding="utf-8")
    return AutoTokenizer.from_pretrained(place)


def test_a_token_over_the_border_refuses_the_record(tmp_path: Path) -> None:
    tokenizer = _tokenizer_with_merges(tmp_path / "a", CHATML, ("Ċ", "Ċ"))
    assert runs(tokenizer, encode(tokenizer, conversation("a", "b\n\nc"))) == ["b\n\nc<eos>"]
    with pytest.raises(DataError, match=r"a:1: the token '\\n\\n' holds the beginning"):
        encode(tokenizer, conversation("a", "\nb"))
    tokenizer = _tokenizer_with_merges(tmp_path / "c", TEMPLATE_C, (".", "Ċ"))
    with pytest.raises(DataError, match=r"token '\.\\n' holds the end"):
        encode(tokenizer, conversation("a", "b.", "c", "d."))
    assert runs(tokenizer, encode(tokenizer, conversation("a", "b", "c", "d."))) == ["b", "d.<eos>"]


def test_a_space_of_the_template_may_belong_to_the_first_word(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}[I] {{ m.content }} [/I]"
        "{% else %} {{ m.content }}<eos>{% endif %}{% endfor %}"
    )
    tokenizer = _tokenizer_with_merges(tmp_path / "a", template, ("Ġ", "y"))
    assert runs(tokenizer, encode(tokenizer, conversation("a", "yes"))) == [" yes<eos>"]
    assert runs(tokenizer, encode(tokenizer, conversation("a", "no"))) == ["no<eos>"]
    plain = _tokenizer_with_merges(tmp_path / "b", None, ("Ġ", "y"))
    assert runs(plain, encode(plain, conversation("a", " yes"), "prompt_completion")) == [" yes<eos>"]
    with pytest.raises(DataError, match="token ' y'"):
        encode(plain, conversation("a ", "yes"), "prompt_completion")


def test_plain_records(folder: Path) -> None:
    tokenizer, tokens = _both(folder, None, conversation("Q: 1+1\nA:", " 2"), "prompt_completion")
    assert tokenizer.decode(tokens.ids) == "Q: 1+1\nA: 2<eos>" and runs(tokenizer, tokens) == [" 2<eos>"]
    tokenizer, tokens = _both(folder, None, conversation("Add.\n\n1", "2"), "instruction")
    assert tokenizer.decode(tokens.ids) == "Add.\n\n1\n\n2<eos>" and runs(tokenizer, tokens) == ["2<eos>"]
    for template in (None, CHATML):
        tokenizer, tokens = _both(folder, template, Text("abc", "a:1"), "text")
        assert tokenizer.decode(tokens.ids) == "abc<eos>"
        assert tokens.is_target.tolist() == [False, True, True, True]


def test_plain_records_keep_the_special_tokens_of_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(save_tokenizer(tmp_path / "t", chat_template=None))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 256), ("<eos>", 257)]
    )
    for prompt in ("a", ""):
        tokens = encode(tokenizer, conversation(prompt, "bc"), "prompt_completion")
        assert tokenizer.decode(tokens.ids) == f"<bos>{prompt}bc<eos>" and runs(tokenizer, tokens) == ["bc<eos>"]


def test_messages_without_a_chat_template_are_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"no chat template[\s\S]*hint"):
        Encoder(tokenizer_with(None, folder), "messages", 100)


def test_overlong_records_are_counted_and_huge_ones_not_tokenised(folder: Path) -> None:
    encoder = Encoder(tokenizer_with(CHATML, folder), "messages", 30)
    exact, huge, fits = encoder.encode(
        [conversation("a", "b" * 30), conversation("a" * 50_000, "b"), conversation("a", "b")]
    )
    assert exact == Overlong(30 + len("user\na") + 3 + len("assistant\n") + 3, exact=True)
    assert isinstance(huge, Overlong) and not huge.exact and 30 < huge.num_tokens < 50_000
    assert isinstance(fits, tuple)


_pieces = st.sampled_from(["a", " ", "\n", "assistant", "<eos>", "é", "user", "😀"])
_content = st.lists(_pieces, min_size=1, max_size=6).map("".join)


@settings(max_examples=80, deadline=None)
@given(
    contents=st.lists(_content, min_size=2, max_size=8).filter(lambda c: all(x.strip() for x in c)),
    template=st.sampled_from([CHATML, TRIMMING]),
)
def test_any_conversation_gives_its_answers(
    tmp_path_factory: pytest.TempPathFactory, contents: list[str], template: str
) -> None:
    tokenizer = tokenizer_with(template, tmp_path_factory.getbasetemp() / "any")
    record = conversation(*contents)
    answers = [text if template == CHATML else text.strip() for text in contents[1::2]]
    learned = runs(tokenizer, encode(tokenizer, record))
    assert learned == [f"{answer}<eos>" for answer in answers]


AWKWARD = st.sampled_from(
    ["<think>", "</think>", "Unisono00001Mark", "assistant\n", "\u2028", "x", "\n\n", "<eos>", "👩‍👩‍👧", "é"]
)


@settings(max_examples=150, deadline=None)
@given(
    contents=st.lists(st.lists(st.one_of(_pieces, AWKWARD), min_size=1, max_size=5).map("".join), min_size=2),
    template=st.sampled_from([CHATML, TRIMMING, TEMPLATE_B, TEMPLATE_C, REASONING]),
)
def test_the_short_way_gives_what_the_long_way_measures(
    tmp_path_factory: pytest.TempPathFactory, contents: list[str], template: str
) -> None:
    tokenizer = tokenizer_with(template, tmp_path_factory.getbasetemp() / "any")
    record = conversation(*contents)
    chat = ChatTemplate(tokenizer)
    learned = range(1, len(contents), 2)
    try:
        long = chat.lay_out(record, learned, measured=True)
    except DataError:
        return  # the long way may refuse where a text looks like a mark
    assert chat.lay_out(record, learned) == long
    assert long.text == tokenizer.apply_chat_template([m.as_dict() for m in record.messages], tokenize=False)
    encoding = tokenizer.backend_tokenizer.encode(long.text, add_special_tokens=False)
    encoder = Encoder(tokenizer, "messages", 10_000)
    for begin, end, closed in long.spans:
        if (quick := _quick_span(encoding, begin, closed)) is not None:
            assert quick == encoder._span(long.text, encoding, begin, end, closed, "a:1")


def test_no_second_beginning_token_whatever_tokenizer_and_template_add(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    brings = "<bos>" + CHATML.replace("<bos>", "")
    for number, (template, begins) in enumerate(((brings, True), (CHATML.replace("<bos>", ""), False), (None, True))):
        tokenizer = AutoTokenizer.from_pretrained(save_tokenizer(tmp_path / str(number), chat_template=template))
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 256)]
        )
        record = conversation("a", "b")
        tokens = encode(tokenizer, record, "prompt_completion")
        assert (tokens.ids == 256).sum() == int(begins) and (tokens.ids[0] == 256) == begins
        if template:
            theirs = tokenizer.apply_chat_template([m.as_dict() for m in record.messages], return_dict=True)
            assert tokens.ids.tolist() == theirs["input_ids"]
        for text in ("abc", "<bos>abc", "<bos>abc<eos>"):
            tokens = encode(tokenizer, Text(text, "a:1"), "text")
            assert tokenizer.decode(tokens.ids) == "<bos>abc<eos>" and tokens.is_target.tolist() == [False] + [True] * 4


def test_b23_a_prompt_that_is_too_long_is_cut_and_an_answer_never(folder: Path) -> None:
    tokenizer = tokenizer_with(CHATML, folder)
    record = conversation("a" * 50, "yes")
    whole = encode(tokenizer, record)
    encoder = Encoder(tokenizer, "messages", 20, overlong="truncate_prompt")
    (answer,) = encoder.encode([record])
    assert isinstance(answer, tuple) and answer[0].is_cut and len(answer[0].ids) == 20
    assert answer[0].ids[0] == 256 and answer[0].ids[1:].tolist() == whole.ids[-19:].tolist()
    assert runs(tokenizer, answer[0]) == ["yes<eos>"]
    for length, fits in ((7, True), (6, True), (5, False)):  # yes, its end, a newline, and what precedes them
        (answer,) = Encoder(tokenizer, "messages", length, overlong="truncate_prompt").encode([record])
        assert (answer == Overlong(len(whole.ids), exact=True)) is not fits
        if fits:
            assert isinstance(answer, tuple) and runs(tokenizer, answer[0]) == ["yes<eos>"]
    huge, hopeless, short = encoder.encode(
        [conversation("a" * 100_000, "yes"), conversation("a", "y" * 100_000), conversation("a", "y")]
    )
    assert isinstance(huge, tuple) and runs(tokenizer, huge[0]) == ["yes<eos>"]
    assert isinstance(hopeless, Overlong) and not hopeless.exact
    assert isinstance(short, Overlong | tuple)
    (middle,) = encoder.encode([conversation("a" * 50, "yes", "b" * 50, "no")])
    assert middle == Overlong(len(encode(tokenizer, conversation("a" * 50, "yes", "b" * 50, "no")).ids), exact=True)


@settings(max_examples=30, deadline=None)
@given(
    words=st.lists(st.text("ab é.\n日", min_size=1, max_size=9), min_size=1, max_size=8),
    length=st.integers(12, 40),
    merging=st.booleans(),
)
def test_b35_the_far_beginning_of_a_huge_prompt_is_not_tokenised(
    tmp_path_factory: pytest.TempPathFactory, words: list[str], length: int, merging: bool
) -> None:
    folder = tmp_path_factory.getbasetemp() / f"huge {merging}"
    merges = [("Ġ", "a"), ("a", "b"), ("Ċ", "a")] if merging else []
    tokenizer = _tokenizer_with_merges(folder, CHATML, *merges)
    record = conversation("so " + " ".join(words) * 2000, "yes")
    encoder = Encoder(tokenizer, "messages", length, overlong="truncate_prompt")
    (short,) = encoder.encode([record])
    layout = encoder._without_far_prompt(encoder._lay_out(record))
    encoder._without_far_prompt = lambda layout: layout  # type: ignore[method-assign]
    (long,) = encoder.encode([record])
    assert isinstance(short, tuple) and isinstance(long, tuple)
    assert short[0].ids.tolist() == long[0].ids.tolist()
    assert short[0].is_target.tolist() == long[0].is_target.tolist() and short[0].is_cut
    assert not layout.is_cut or len(layout.text) <= 2 * encoder._max_characters + 100


def test_pieces_of_a_split_text_need_three_tokens(folder: Path) -> None:
    with pytest.raises(DataError, match="pieces of a split text need 3 tokens"):
        Encoder(tokenizer_with(CHATML, folder), "text", 2, overlong="split")


@settings(max_examples=60, deadline=None)
@given(size=st.integers(3, 12), text=st.text("ab é", min_size=1, max_size=60).filter(str.strip))
def test_a_split_text_loses_nothing(tmp_path_factory: pytest.TempPathFactory, size: int, text: str) -> None:
    tokenizer = tokenizer_with(CHATML, tmp_path_factory.getbasetemp() / "any")
    (pieces,) = Encoder(tokenizer, "text", size, overlong="split").encode([Text(text, "a:1")])
    assert isinstance(pieces, tuple)
    assert np.concatenate([piece.ids for piece in pieces]).tolist() == [*text.encode(), 257]
    for piece in pieces:
        assert 2 <= len(piece.ids) <= size
        assert piece.is_target.tolist() == [False] + [True] * (len(piece.ids) - 1)


def test_conversations_are_not_split(folder: Path) -> None:
    with pytest.raises(DataError, match=r"data\.overlong is split[\s\S]*truncate_prompt"):
        Encoder(tokenizer_with(CHATML, folder), "messages", 10, overlong="split")


def test_what_the_tokenizers_library_refuses_is_told(tmp_path: Path) -> None:
    place = save_tokenizer(tmp_path / "t")
    file = place / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(content | {"model": {"type": "Unknown"}}), encoding="utf-8")
    with pytest.raises(ModelError, match="the tokenizer cannot be loaded"):
        Encoder(load_tokenizer(place, trust_remote_code=False), "messages", 100)


def test_a_template_that_is_not_jinja_is_told(tmp_path: Path) -> None:
    place = save_tokenizer(tmp_path / "t", chat_template="{% for m in messages %}{{ m.content }}")
    with pytest.raises(ModelError, match="not valid Jinja"):
        Encoder(load_tokenizer(place, trust_remote_code=False), "messages", 100)


def test_the_starter_has_the_ids_of_serving() -> None:
    folders = sorted((Path.home() / ".cache/unisono/starter").glob("*/tokenizer.json"))
    if not folders:
        pytest.skip("the starter model is not there")
    encoder = Encoder(load_tokenizer(folders[0].parent, trust_remote_code=False), "messages", 8192)
    tokenizer = encoder._tokenizer
    num_seen = 0
    for record in conversations_of_b19():
        if any(m.content != m.content.strip() for m in record.messages):
            continue  # this tokenizer joins white space at the border to the header's newline
        num_seen += 1
        (answer,) = encoder.encode([record])
        assert isinstance(answer, tuple)
        theirs = tokenizer.apply_chat_template([m.as_dict() for m in record.messages], return_dict=True)["input_ids"]
        assert answer[0].ids.tolist() == theirs
        answers = [m.content + "<|im_end|>" for m in record.messages if m.role == "assistant"]
        assert runs(tokenizer, answer[0]) == answers
    assert num_seen > 5
