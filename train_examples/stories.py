"""A seeded story generator: characters, things and places that recur, in plain sentences, for where no hub is.

Every story has two characters with names made of random syllables, a thing (adjective and noun), a place, and a song
of random syllables that is sung and sung again. All of them come back in the story, so that a reader who looks back can
say how a name or the song goes on: that is what induction is worth here, by design. With ``song_share`` some stories
are one long song in which phrases come back at random places (the copy process of ``copy_process``, sung): without
them a grammar so small leaves induction over free tokens nearly nothing to gain. The stories make no claim to be
TinyStories; they have its layout (short texts, one a document).
"""

from __future__ import annotations

import random
from collections.abc import Iterator


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


#: The 60 syllables that names are made of (three or four a name).
SYLLABLES = tuple(sorted(onset + vowel for onset in "bdfgklmnprtv" for vowel in "aeiou"))
#: Words that no story uses: the code words of the key-retrieval task when the stories are generated.
CODE_WORDS = _words(
    "amber basalt cedar denim ember falcon garnet hazel indigo jasper kelp lilac maple nutmeg opal pepper quartz "
    "raven saffron topaz umber velvet walnut yarrow zinc almond birch copper daisy elder fennel ginger heron ivory "
    "juniper knight lemon marble nickel olive pearl quince ruby silver thyme tulip violet willow acorn bronze coral "
    "dune eagle fern granite hickory iris jade kiwi lotus mango nectar otter plum"
)
_ADJECTIVES = _words(
    "red blue green yellow tiny big old new soft round shiny warm cold quiet funny sweet heavy little brave sleepy"
)
_NOUNS = _words(
    "ball box boat kite drum lamp ring hat cake shell stone feather basket blanket bell flute mirror wagon ladder key"
)
_PLACES = _words("river forest hill garden house lake road barn bridge tower market cave")
_FEELINGS = _words("happy sad glad proud tired curious afraid excited")

_OPENINGS = (
    "One day, {a} went to the {place}.",
    "Once upon a time, {a} lived near the {place}.",
    "{a} and {b} were friends.",
    "In the morning, {a} met {b} at the {place}.",
)
_EVENTS = (
    "{a} found the {thing}.",
    "{b} wanted to see the {thing}.",
    "{a} gave the {thing} to {b}.",
    '"Look at the {thing}," said {a}.',
    "{b} was very {feeling}.",
    "{a} and {b} took the {thing} to the {place}.",
    "They lost the {thing} near the {place}.",
    "{b} asked {a} for help.",
    "{a} looked for {b}.",
    'Then {b} said, "Thank you, {a}."',
    "{a} put the {thing} on the ground.",
    "{b} ran away from {a}.",
    "{a} was {feeling} because {b} had the {thing}.",
    "At the {place}, {b} saw the {thing} again.",
)
_SONGS = (
    '{a} sang, "{song}." Then {b} sang, "{song}."',
    "{a} taught {b} a song: {song}. {b} sang it: {song}.",
    '"{song}," sang {a}. "{song}," sang {b}.',
)
#: Syllables of a long song: more than fit into a row of 64 tokens, so that no row has to guess where the song ends.
SONG_LENGTH = (64, 96)
#: Chance that the song goes back to an earlier place, at each syllable outside a copy; and that the copy ends, at each
#: syllable of it.
COPY_START, COPY_END = 0.2, 0.1
_ENDINGS = (
    "{a} and {b} went home with the {thing}.",
    "From that day, {a} and {b} played with the {thing}.",
    "{b} was {feeling}, and {a} was {feeling} too.",
)


def story(seed: int, number: int, song_share: float = 0.0) -> str:
    """Story ``number`` of the corpus ``seed``: the same numbers give the same text, on any machine.

    ``song_share``: chance that it is a long song (``long_song``); the other stories are the same for every share.
    """
    if song_share:
        rng = random.Random(f"{seed}/{number}/song")
        if rng.random() < song_share:
            return f"{_name(rng)} sang: {long_song(rng)}."
    rng = random.Random(f"{seed}/{number}")
    cast = {
        "a": _name(rng),
        "b": _name(rng),
        "thing": f"{rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)}",
        "place": f"{rng.choice(_ADJECTIVES)} {rng.choice(_PLACES)}",
        "song": " ".join(rng.choices(SYLLABLES, k=rng.randint(5, 9))),
    }
    events = rng.choices(_EVENTS, k=rng.randint(4, 7))
    events.insert(rng.randint(0, 1), rng.choice(_SONGS))
    sentences = [rng.choice(_OPENINGS), *events, rng.choice(_ENDINGS)]
    told = []
    for sentence in sentences:
        if rng.random() < 0.5:  # either of the two may be the one who acts
            cast["a"], cast["b"] = cast["b"], cast["a"]
        told.append(sentence.format(feeling=rng.choice(_FEELINGS), **cast))
    return " ".join(told)


def long_song(rng: random.Random) -> str:
    """Random syllables among which phrases are sung again, each from a uniformly random earlier place of the song."""
    song, place = list[str](), -1  # place: where the running copy reads next; -1 outside a copy
    for at in range(rng.randint(*SONG_LENGTH)):
        if place < 0 and at and rng.random() < COPY_START:
            place = rng.randrange(at)
        if place < 0:
            song.append(rng.choice(SYLLABLES))
            continue
        song.append(song[place])
        place = -1 if rng.random() < COPY_END else place + 1
    return " ".join(song)


def stories(seed: int, count: int, first: int = 0, song_share: float = 0.0) -> Iterator[str]:
    """Stories ``first`` to ``first + count - 1`` of the corpus ``seed``."""
    return (story(seed, number, song_share) for number in range(first, first + count))


def _name(rng: random.Random) -> str:
    return "".join(rng.choices(SYLLABLES, k=rng.randint(3, 4))).capitalize()
