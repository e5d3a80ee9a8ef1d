"""What crosses between the process with the tests and the one with the solution: values, and nothing but values."""

import math
import pickle
import random
import struct

import pytest

from trainer.reward.code.inside.wire import DEPTH_LIMIT, FRAME_LIMIT, Decoder, Encoder, Table, Uncrossable, WireError


def plain(value):
    return None


def refuse(tag, content):
    raise WireError(f"an unknown tag {tag!r}")


def encode(value, table=None) -> bytes:
    encoder = Encoder(Table() if table is None else table, plain)
    encoder.value(value)
    return bytes(encoder.out)


def decode(data: bytes, table=None):
    decoder = Decoder(data, Table() if table is None else table, refuse)
    value = decoder.value()
    decoder.end()
    return value


VALUES = [
    *(None, True, False, 0, -1, 127, 128, -129, 10**400, -(2**64), 0.1, -0.0, math.inf, 1e-320, 2 - 3j),
    *("", "é\n\0", "\ud800", b"", b"\xff", bytearray(b"ab"), (), (1, (2,)), [], [[1], "a"], {}, {1: [2], "a": {}}),
    *(set(), {1, "a", (2,)}, frozenset({1}), {(1, 2): frozenset()}, range(3), range(9, -9, -2)),
]


def name_of(value: object) -> str:
    """The same in every process, which the order inside a set is not."""
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, set | frozenset) else repr(value)


@pytest.mark.parametrize("value", VALUES, ids=name_of)
def test_plain_values_keep_value_and_type(value):
    again = decode(encode(value))
    same_text = isinstance(value, set | frozenset) or repr(again) == repr(value)  # sets have no order
    assert again == value and type(again) is type(value) and same_text


def test_known_bytes():
    assert encode([1, "é"]) == b"l\2\0\0\0i\1\0\0\0\1s\2\0\0\0\xc3\xa9"
    assert encode({None: (True,)}) == b"d\2\0\0\0Nt\1\0\0\0T"


def test_one_container_stays_one_and_may_hold_itself():
    inner = [1]
    loop = [inner, inner]
    loop.append(loop)
    again = decode(encode(loop))
    assert again[0] is again[1] and again[2] is again


def test_contents_bring_the_callers_containers_up_to_date():
    mine = [3, {"a": [1]}]
    mine_table, theirs_table = Table(), Table()
    theirs = decode(encode((mine, 5), mine_table), theirs_table)[0]
    theirs.insert(0, theirs[1]["a"])
    theirs[2]["a"].append(theirs)
    reply = Encoder(theirs_table, plain)
    reply.contents()
    reply.value((theirs, [7]))
    nested, inner = mine[1], mine[1]["a"]
    decoder = Decoder(bytes(reply.out), mine_table, refuse)
    decoder.contents()
    result = decoder.value()
    decoder.end()
    assert mine[0] is inner and mine[1] == 3 and mine[2] is nested and inner == [1, mine]
    assert result[0] is mine and result[1] == [7]


def test_a_container_cannot_change_its_type():
    table = Table()
    encode([1], table)
    with pytest.raises(WireError, match="changed its type"):
        Decoder(b"#\1\0\0\0" + encode({}), table, refuse).contents()
    with pytest.raises(WireError, match="do not match"):
        Decoder(b"#\2\0\0\0", table, refuse).contents()


def test_subclasses_and_iterators_become_plain():
    class Liar(int):
        def __index__(self):
            return 9

        __int__ = __index__

    class Text(str):
        def encode(self, *arguments):
            return b"other"

    class Items(list):
        def __iter__(self):
            return iter("lies")

    again = decode(encode([Liar(4), Text("a"), Items([1]), iter((1, 2)), {1: 2}.values()]))
    assert again == [4, "a", [1], [1, 2], [2]]
    assert [type(item) for item in again] == [int, str, list, list, list]


@pytest.mark.parametrize("value", [object(), len, ValueError(), {1: object()}, [type], (1).__add__])
def test_anything_else_may_not_cross(value):
    with pytest.raises(Uncrossable, match="no plain data"):
        encode(value)


def test_limits():
    deep = []
    for _ in range(DEPTH_LIMIT - 1):
        deep = [deep]
    assert decode(encode(deep)) == deep
    with pytest.raises(WireError, match="levels"):
        encode([[deep]])
    with pytest.raises(WireError, match="levels"):
        decode(b"l\1\0\0\0" * (DEPTH_LIMIT + 2) + b"N")
    for big in ("x" * (FRAME_LIMIT + 1), [0] * FRAME_LIMIT, (0 for _ in iter(int, 1)), {"a": b"x" * (FRAME_LIMIT + 1)}):
        with pytest.raises(WireError, match="bytes"):
            encode(big)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"i", b"l\5\0\0\0N", b"s\2\0\0\0\xff\xff", b"NN", b"@\0\0\0\0", b"?N", b"d\1\0\0\0N", b"H\0"),
        *(b"e\1\0\0\0l\0\0\0\0", b"d\2\0\0\0l\0\0\0\0N", b"rt\1\0\0\0N", b"l\xff\xff\xff\xff" + b"N" * 99),
        encode(range(1))[:-1],
        b"rt\3\0\0\0" + encode(1) + encode(2) + encode(0),
        pickle.dumps([1, 2]),
    ],
)
def test_bytes_of_another_form_are_refused(data):
    with pytest.raises(WireError):
        decode(data)


def test_no_bytes_do_anything_but_give_a_value_or_an_error():
    source = random.Random(0)
    seeds = [encode(value) for value in VALUES] + [encode(VALUES[-20:-12])]
    for _ in range(20_000):
        data = bytearray(source.choice(seeds) + source.randbytes(source.randrange(4)))
        for _ in range(source.randrange(1, 4)):
            if data:
                data[source.randrange(len(data))] = source.choice(b"NTFificsbldetzry@HO\0\1\2\xff")
        try:
            value = decode(bytes(data))
        except WireError:
            continue
        assert type(value) in {type(v) for v in VALUES}


def test_a_length_costs_nothing_before_its_bytes_are_there():
    with pytest.raises(WireError, match="too early"):
        decode(b"b" + struct.pack("<I", 2**32 - 1))
