"""The board keeps each bucket until the last rank that counts let go of it, and wakes whoever waits.

It runs here as it is, on an event loop of the test, without Ray: a reference is any object.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.transports.board import Board

SESSION = ["r1", 1, 1]
SOON = 10.0


def played(game: Coroutine[Any, Any, None]) -> None:
    """Play it to its end, which is near."""
    asyncio.run(asyncio.wait_for(game, SOON))


async def board_of(*keys: str, ranks: int = 1) -> Board:
    """A board with one round, of engines with these keys that have begun to receive."""
    board = Board()
    await board.begin("round", SESSION, dict.fromkeys(keys, ranks))
    for key in keys:
        for rank in range(ranks):
            assert await board.enter(key, rank) == ("", SESSION)
    return board


def test_a_bucket_is_kept_until_the_last_rank_let_go() -> None:
    """The slow rank gets what the fast one let go of long ago."""

    async def game() -> None:
        board = await board_of("fast", "slow")
        for index in (0, 1):
            await board.show("round", index, [f"ref{index}"])
            assert await board.take("fast", 0, index) == ("", [SESSION, index, [f"ref{index}"]])
        waiting = asyncio.create_task(board.take("fast", 0, 2))
        await asyncio.sleep(0)
        assert await board.held() == (1, 2), "a bucket was forgotten that a rank has not seen"
        assert await board.take("slow", 0, 0) == ("", [SESSION, 0, ["ref0"]])
        assert await board.take("slow", 0, 1) == ("", [SESSION, 1, ["ref1"]])
        assert await board.held() == (1, 1)
        await board.end("round", "over")
        assert await waiting == ("over", None)
        assert await board.held() == (0, 0)

    played(game())


def test_a_rank_that_is_cut_is_not_waited_for() -> None:
    """What only it had not read is forgotten; its own wait ends with the reason."""

    async def game() -> None:
        board = await board_of("a", "b")
        await board.show("round", 0, ["ref0"])
        await board.take("a", 0, 0)
        waiting = asyncio.create_task(board.take("b", 0, 1))
        await asyncio.sleep(0)
        await board.cut("round", ["b"], "fenced")
        assert await waiting == ("fenced", None)
        assert await board.held() == (1, 1), "the one that counts still reads it"
        await board.leave("a", 0, 1, "done")
        assert await board.held() == (1, 0)
        assert (await board.take("b", 0, 1))[0] == "fenced"

    played(game())


def test_a_watch_ends_with_every_change_and_with_the_round() -> None:
    """The trainer sees who let go of what and who left, and that it is over."""

    async def game() -> None:
        board = await board_of("a", ranks=2)
        seen = await board.watch("round", 0)
        assert seen == (1, {("a", 0): (0, True), ("a", 1): (0, True)})
        watching = asyncio.create_task(board.watch("round", 1))
        await asyncio.sleep(0)
        assert not watching.done()
        await board.leave("a", 1, 0, "it failed")
        changed = await watching
        assert changed is not None
        assert changed[1] == {("a", 0): (0, True), ("a", 1): (0, False)}
        last = asyncio.create_task(board.watch("round", changed[0]))
        await asyncio.sleep(0)
        await board.end("round", "over")
        assert await last is None
        assert await board.watch("round", 0) is None

    played(game())


def test_a_ticket_is_good_for_one_reception_of_one_round() -> None:
    """Not for a second one, a rank that is none, or a round that is over; nor can it inject anything."""

    async def game() -> None:
        board = await board_of("a")
        assert "already" in (await board.enter("a", 0))[0]
        assert "nowhere" in (await board.enter("a", 1))[0]
        assert "nowhere" in (await board.enter("guessed", 0))[0]
        await board.end("round", "over")
        await board.begin("next", ["r2", 2, 2], {"b": 1})
        await board.show("next", 0, ["ref0"])
        before = await board.watch("next", 0)
        assert "nowhere" in (await board.enter("a", 0))[0]
        assert (await board.take("a", 0, 0))[1] is None
        await board.leave("a", 0, 9, "late")
        await board.cut("round", ["b"], "late")
        await board.show("round", 0, ["late"])
        await board.end("round", "late")
        assert await board.watch("next", 0) == before, "a word of a round that is over changed another one"

    played(game())


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["take", "leave", "cut"])), min_size=1, max_size=40
    )
)
def test_kept_is_what_somebody_needs(moves: list[tuple[str, str]]) -> None:
    """After any moves, the board has just the buckets that a rank that counts has not let go of."""

    async def game() -> None:
        board, shown = await board_of("a", "b", "c"), 12
        for index in range(shown):
            await board.show("round", index, [index])
        asked, counting = dict.fromkeys("abc", 0), set("abc")
        for who, what in moves:
            if what == "take" and asked[who] < shown and who in counting:
                assert await board.take(who, 0, asked[who]) == ("", [SESSION, asked[who], [asked[who]]])
                asked[who] += 1
            elif what == "leave":
                await board.leave(who, 0, 0, "left")
                counting.discard(who)
            elif what == "cut":
                await board.cut("round", [who], "cut")
                counting.discard(who)
        # Who asked for k let go of all before k.
        needed = shown - min((max(asked[who] - 1, 0) for who in counting), default=shown)
        assert await board.held() == (1, needed)

    played(game())


@pytest.mark.parametrize("word", ["show", "watch", "cut", "leave", "end"])
def test_a_word_of_a_round_that_there_is_not_does_no_harm(word: str) -> None:
    """Words come late, and twice."""
    rest: dict[str, tuple[Any, ...]] = {
        "show": (0, []), "watch": (0,), "cut": ([], "why"), "leave": (0, 0, "why"), "end": ("why",)
    }  # fmt: skip

    async def game() -> None:
        board = Board()
        assert await getattr(board, word)("none", *rest[word]) is None
        assert await board.held() == (0, 0)

    played(game())
