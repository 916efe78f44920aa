"""Baton's keys of vLLM's blocks are the same as a router computes from a prompt."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.blocks import block_keys
from engine.core.block_pool import BlockChange, Removed, Stored
from engine.vllm.block_names import BlockNames
from engine.vllm.messages import StoredBlock

SIZE = 32
PROMPT = list(range(100, 100 + 5 * SIZE))
SEED = b"tenant"
KEYS = block_keys(SEED, PROMPT, SIZE)


def chain(prompt: list[int] = PROMPT, salt: bytes = SEED, name: str = "") -> list[StoredBlock]:
    """The blocks of a prompt. Each block's hash is its index."""
    number = len(prompt) // SIZE
    names = [f"{name}{index}" for index in range(number)]
    return [
        StoredBlock(
            names[index],
            names[index - 1] if index else "",
            prompt[index * SIZE : (index + 1) * SIZE],
            "" if index else salt.hex(),
        )
        for index in range(number)
    ]


def test_a_chain_has_the_keys_of_its_prompt() -> None:
    names = BlockNames()
    assert names.update(chain()[:2], ()) == [Stored(KEYS[0]), Stored(KEYS[1])]
    assert names.update(chain()[2:], ()) == [Stored(key) for key in KEYS[2:]]
    assert names.keys() == KEYS
    assert [names.name_of(key) for key in KEYS] == ["0", "1", "2", "3", "4"]
    assert len(names) == 5
    assert names.name_of(b"another") is None


def test_two_tenants_have_different_keys_of_the_same_tokens() -> None:
    names = BlockNames()
    names.update([*chain(), *chain(salt=b"other", name="o")], ())
    assert names.keys() == KEYS + block_keys(b"other", PROMPT, SIZE)
    assert names.name_of(block_keys(b"other", PROMPT, SIZE)[2]) == "o2"


def test_a_block_whose_predecessor_is_unknown_has_no_key() -> None:
    names = BlockNames()
    assert names.update(chain()[1:], ()) == []
    assert names.keys() == []
    assert names.update((), ["3"]) == []
    assert names.update(chain(), ()) == [Stored(key) for key in KEYS], (
        "all blocks have keys once the first one is cached"
    )


def test_a_block_that_is_reported_again_is_stored_once() -> None:
    names = BlockNames()
    names.update(chain(), ())
    assert names.update(chain(), ()) == []
    assert names.update([*chain()[3:], *chain()[3:]], ["4"]) == [Removed(KEYS[4])]
    assert names.update(chain()[3:], ()) == [Stored(KEYS[4])]


def test_a_block_that_was_stored_and_evicted_in_one_step_is_both() -> None:
    names = BlockNames()
    assert names.update(chain()[:1], ["0"]) == [Stored(KEYS[0]), Removed(KEYS[0])]
    assert (len(names), names.name_of(KEYS[0])) == (0, None)


def test_blocks_after_an_evicted_one_keep_their_keys() -> None:
    """vLLM evicts a prompt's last blocks first, but may evict a shared block before the others."""
    names = BlockNames()
    names.update(chain(), ())
    assert names.update((), ["1", "no block of this name"]) == [Removed(KEYS[1])]
    assert names.keys() == [KEYS[0], *KEYS[2:]]
    assert names.update(chain()[1:2], ()) == [Stored(KEYS[1])]


@given(st.data())
def test_the_changes_replayed_are_the_keys_that_are_known(data: st.DataObject) -> None:
    names, index = BlockNames(), set[bytes]()
    blocks = [*chain(), *chain(salt=b"other", name="o")]
    for _ in range(data.draw(st.integers(1, 6))):
        stored = data.draw(st.lists(st.sampled_from(blocks), max_size=6))
        removed = data.draw(st.lists(st.sampled_from([block.name for block in blocks]), max_size=4, unique=True))
        changes: list[BlockChange] = names.update(stored, removed)
        for change in changes:
            if isinstance(change, Stored):
                assert change.key not in index
                index.add(change.key)
            else:
                index.remove(change.key)
        assert index == set(names.keys())
        assert len(names) == len(index)
        assert all(names.name_of(key) for key in index)
