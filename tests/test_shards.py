"""Collections in pieces: they have what a dict or a set would have, and are whole after an exception anywhere."""

import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raising import Raising
from sweepgrad import shards
from sweepgrad.shards import MANY, PIECE, Shards, including, others_than, parts

NUMBERS = st.integers(0, 3 * PIECE) | st.sampled_from([0, PIECE - 1, PIECE, 2 * PIECE - 1, 2 * PIECE])


@given(st.lists(st.tuples(st.sampled_from(["add", "piece", "discard", "discard unless only"]), NUMBERS)))
def test_as_a_dict(steps):
    made, like = Shards(), {}
    for step, number in steps:
        if step == "discard":
            assert made.discard(number) == (like.pop(number, None) is not None)
        elif step == "discard unless only":
            stays = list(like) == [number]
            assert made.discard_unless_only(number) == (not stays)
            if not stays:
                like.pop(number, None)
        elif step == "add":
            made.add(number, number + 1)
            like[number] = number + 1
        else:
            made.piece(number)[number] = number + 1
            like[number] = number + 1
        assert (number in made) == (number in like)
    assert dict(made.items()) == like
    assert sorted(made) == sorted(like.values())
    assert (len(made), bool(made)) == (len(like), bool(like))


def test_pieces_are_small_and_go_when_they_are_empty():
    made = Shards()
    numbers = list(range(100, 100 + 5 * PIECE))
    random.Random(0).shuffle(numbers)
    for number in numbers:
        made.add(number, number)
    assert [len(piece) <= PIECE for piece in made.pieces.values()] == [True] * 6
    for number in numbers[:-1]:
        made.discard(number)
    assert list(made) == numbers[-1:]
    assert [len(piece) for piece in made.pieces.values()] == [1]
    made.discard(numbers[-1])
    assert not made.pieces


def test_a_piece_that_shrinks_gives_memory_back():
    made = Shards()
    for number in range(PIECE):
        made.add(number, number)
    for left in (256, 16, 1):
        for number in range(len(made) - 1, left - 1, -1):
            made.discard(number)
        (piece,) = made.pieces.values()
        assert sys.getsizeof(piece) < 300 + 100 * left
        assert list(made) == list(range(left))


def test_an_empty_piece_is_nothing():
    made = Shards()
    made.piece(7)
    assert (bool(made), len(made), list(made), 7 in made) == (False, 0, [], False)


class Numbered:
    def __init__(self, number):
        self.id = number


def contents(some):
    return [each for part in parts(some) for each in (part.values() if isinstance(part, dict) else [part])]


@given(st.data(), st.integers(0, 3), st.integers(0, 3))
def test_one_several_or_very_many(data, many, bits):
    """As a set, whatever the sizes at which its form changes; the last one is never taken out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "MANY", many)
        patch.setattr(shards, "BITS", bits)
        every = [Numbered(number) for number in range(12)]
        some, like = every[0], {0}
        for number in data.draw(st.lists(st.integers(0, 11))):
            one = every[number]
            if data.draw(st.booleans()) and like != {number}:
                some = including(some, one)
                like.add(number)
            else:
                assert others_than(one, some) == (like != {number})
                if like != {number}:
                    like.discard(number)
            assert sorted(each.id for each in contents(some)) == sorted(like)


def test_the_form_depends_on_how_many_there_are():
    every = [Numbered(number) for number in range(MANY + 1)]
    some = every[0]
    for count, one in enumerate(every[1:], 2):
        some = including(some, one)
        assert type(some) is (set if count <= MANY else Shards)
        assert len(some) == count


@pytest.mark.parametrize("nothing", [None, frozenset()])
def test_nothing_has_others(nothing):
    assert others_than(Numbered(1), nothing)


def test_an_exception_anywhere_leaves_a_change_made_or_not():
    """And the same change once more makes it whole."""
    before, one = {k: Numbered(k) for k in (PIECE - 1, PIECE)}, Numbered(2 * PIECE)

    def made(numbers):
        found = Shards()
        for number in numbers:
            found.add(number, before.get(number, one))
        return found

    for change, start in [
        (lambda some: some.add(one.id, one), before),
        (lambda some: some.discard(PIECE), before),
        (lambda some: including(some, one), before),
        (lambda some: others_than(before[PIECE], some), before),
        (lambda some: others_than(before[PIECE], some), [PIECE]),
    ]:
        after = made(start)
        change(after)
        for point in range(1, 100):
            some = made(start)
            where = Raising(shards.__file__, point).by_lines(lambda some=some, change=change: change(some))
            assert dict(some.items()) in (dict(made(start).items()), dict(after.items()))
            assert all(some.pieces.values())
            change(some)
            assert dict(some.items()) == dict(after.items())
            if where is None:
                break
        assert 2 < point < 99
