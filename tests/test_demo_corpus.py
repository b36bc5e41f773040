"""The demo corpus: what counts as clean English, how each kind of package is read, and that training never saw validation.

No package is fetched: `apt-get` and `dpkg-deb` are two small scripts on PATH, and a package is a tar file.
"""

from __future__ import annotations

import dataclasses
import errno
import gzip
import io
import json
import shutil
import sys
import tarfile
import types
import zlib
from pathlib import Path

import pytest

from demo_model import corpus, corpus_packages, corpus_readers
from demo_model.corpus import Document, build, held_out, within_cap, without_echoes, without_repeats
from demo_model.corpus_errors import (
    CorpusError,
    MissingPackage,
    MissingReader,
    NoApt,
    NoRoom,
    TooFewDocuments,
    UnreadablePackage,
)
from demo_model.corpus_sources import SOURCES, Source
from demo_model.corpus_text import clean, clean_lines, fingerprint, is_prose, paragraphs, position, prose

# --- cleaning ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rough", "smooth"),
    [
        ("\u201cIt\u2019s here,\u201d she said\u2026", '"It\'s here," she said...'),
        ("a house\u2014a home, 1811\u20131817", "a house--a home, 1811-1817"),
        ("between\u00a0 _them_ it\twas   more", "between them it was more"),
        ("snake_case_names stay", "snake_case_names stay"),
        ("cafe\u0301 and soft\u00adhyphen", "caf\u00e9 and softhyphen"),
        ("the end .  Really ?", "the end. Really?"),
        ("page\x0cbreak", "page break"),
    ],
)
def test_cleaning_keeps_the_words_and_simplifies_the_typography(rough: str, smooth: str) -> None:
    assert clean(rough) == smooth


def test_hard_wrapped_lines_become_one_line_per_paragraph() -> None:
    assert list(paragraphs("  One two\n  three.\n\n\n  Four.\n   \n")) == ["One two three.", "Four."]


def test_verse_keeps_its_lines() -> None:
    assert clean_lines("  The fog comes \n\n  on little  cat feet.\n") == "The fog comes\non little cat feet."


@pytest.mark.parametrize(
    "text",
    [
        "It is a truth universally acknowledged, that a single man must be in want of a wife.",
        '"You want to tell me, and I have no objection to hearing it," he said.',
        "The project was 5 years old by then, and it had more than 400 members in 30 countries.",
    ],
)
def test_sentences_are_prose(text: str) -> None:
    assert is_prose(text)


@pytest.mark.parametrize(
    "text",
    [
        "Too short to say a thing.",
        "for (i = 0; i < n; i++) { total += values[i]; } return total;",
        "Next Previous Up Contents Index Search Home Download Documentation Support.",
        "Les chevaux couraient dans la plaine et le soleil brillait sur les collines.",
        "See https://example.org/manual for what the options of this command mean to you.",
        "The heading of a chapter that has no mark at its end but many words in it",
        "continued from the page before, where the sentence that ends here was begun.",
        "IT IS THE USER WHO BEARS THE ENTIRE RISK AS TO THE QUALITY OF THE PROGRAM.",
        "The offsets are 0x1f00 and 0x2f00 and 0x3f00 and 0x4f00 for the four of them.",
    ],
)
def test_code_lists_titles_fragments_and_other_languages_are_not_prose(text: str) -> None:
    assert not is_prose(text)


def test_what_repeats_at_once_is_kept_once() -> None:
    text = "The same note is shown on top of and below each of the tables."
    assert prose([text, text, "No."]) == [text]


def test_a_fingerprint_sees_the_words_only() -> None:
    assert fingerprint('"It is,  he said."') == fingerprint("IT IS he said")
    assert fingerprint("It is not") != fingerprint("It is now")


def test_a_position_depends_on_the_seed_and_the_name_alone() -> None:
    assert position(1, "emma 01") == position(1, "emma 01") != position(2, "emma 01")
    places = [position(1, str(number)) for number in range(2000)]
    assert all(0 <= place < 1 for place in places)
    assert sum(places) / len(places) == pytest.approx(0.5, abs=0.03)


# --- readers -----------------------------------------------------------------------------------------------------------


def put(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode()
    path.write_bytes(gzip.compress(data) if name.endswith((".dz", ".gz")) else data)
    return folder


def all_paragraphs(documents) -> list[str]:
    return [paragraph for _, found in documents for paragraph in found]


def test_a_novel_is_read_by_chapter_without_titles_and_volumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The R data base: an index of (start, length), and per object its size in 4 bytes and a zlib stream."""
    lines = [
        "EMMA",
        "",
        "CHAPTER I",
        "",
        "Emma was handsome",
        "and clever.",
        "",
        "VOLUME II",
        "",
        "CHAPTER I",
        "",
        "Sorrow came.",
    ]
    packed = b"\0\0\0\0" + zlib.compress(json.dumps([*lines, "", "FINIS"]).encode())
    index = {"variables": {"emma": [3, len(packed)]}}
    put(tmp_path, "data/Rdata.rdx", json.dumps(index))
    (tmp_path / "data/Rdata.rdb").write_bytes(b"gap" + packed)
    stand_in = types.SimpleNamespace(
        parser=types.SimpleNamespace(parse_data=json.loads),
        conversion=types.SimpleNamespace(convert=lambda parsed: parsed),
    )
    monkeypatch.setitem(sys.modules, "rdata", stand_in)
    assert list(corpus_readers.austen(tmp_path)) == [
        ("emma 01", ["Emma was handsome and clever."]),
        ("emma 02", ["Sorrow came."]),
    ]


def test_scripture_keeps_the_translators_paragraphs_and_drops_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    osis = (
        '<title>Of Old</title><div sID="g1" type="x-p"/>Now the <w lemma="strong:H5175">serpent</w> was more subtle'
        '<note placement="foot">Heb. wise</note>.\nHe said:<div eID="g1" type="x-p"/>\n<div sID="g2" type="x-p"/>\u00b6 Yes.'
    )
    monkeypatch.setattr(corpus_readers, "_sword_chapters", lambda folder: iter([("Genesis 003", osis)]))
    assert list(corpus_readers.sword_bible(Path())) == [
        ("Genesis 003", ["Now the serpent was more subtle. He said:", "Yes."])
    ]


def test_a_commentary_loses_its_verse_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "The woman, for her sin, is condemned to a state of sorrow, and of subjection to another."
    osis = (
        f'<div sID="g1" type="x-p"/> <hi>Verses 16-19</hi> <div eID="g1" type="x-p"/><div type="x-p"/>Verse 16. {said}'
    )
    monkeypatch.setattr(corpus_readers, "_sword_chapters", lambda folder: iter([("Genesis 003", osis)]))
    assert list(corpus_readers.sword_commentary(Path())) == [("Genesis 003", [said])]


def test_webster_is_told_as_word_and_meaning(tmp_path: Path) -> None:
    entry = (
        'Abjure \\Ab*jure"\\, v. t. [imp. & p. p. {Abjured}.] [L. abjurare to deny.]\n'
        "   1. To renounce upon oath; to abandon; as, to {abjure} allegiance to a\n"
        "      prince. To abjure the realm, is to swear to abandon it. --Shak.\n      [1913 Webster]\n\n"
        "   Syn: See {Renounce}.\n        [1913 Webster]\n"
    )
    put(tmp_path, "gcide.dict.dz", "\n" + entry)
    assert all_paragraphs(corpus_readers.gcide(tmp_path)) == [
        "Abjure: To renounce upon oath; to abandon; as, to abjure allegiance to a prince. "
        "To abjure the realm, is to swear to abandon it."
    ]


def test_wordnet_senses_without_an_example_are_left_out(tmp_path: Path) -> None:
    put(
        tmp_path,
        "wn.dict.dz",
        '\nabsolute\n    adj 1: perfect or complete or pure; "he gave an absolute\n           guarantee" [ant: {relative}]\n'
        "    2: not limited by law at all\n",
    )
    assert all_paragraphs(corpus_readers.wordnet(tmp_path)) == [
        'absolute (adjective): perfect or complete or pure. "He gave an absolute guarantee."'
    ]


def test_computing_entries_lose_links_tags_and_dates(tmp_path: Path) -> None:
    put(
        tmp_path,
        "foldoc.dict.dz",
        "\nActors\n\n   <theory> A model for {concurrency} in which the actors are autonomous and concurrent\n   objects that "
        "execute {asynchronously} and send messages to each other.\n\n   {(http://osl.cs.uiuc.edu/)}.\n\n   (1999-11-23)\n",
    )
    assert all_paragraphs(corpus_readers.foldoc(tmp_path)) == [
        "Actors: A model for concurrency in which the actors are autonomous and concurrent objects that execute "
        "asynchronously and send messages to each other."
    ]


def test_jargon_entries_lose_pronunciation_and_braces(tmp_path: Path) -> None:
    put(
        tmp_path,
        "jargon.dict.dz",
        "\nblue wire\n n.\n\n    [IBM] Patch wires that are added to circuit boards at the factory\n"
        "    to correct design problems. Compare {red wire}.\n",
    )
    assert all_paragraphs(corpus_readers.jargon(tmp_path)) == [
        "blue wire: Patch wires that are added to circuit boards at the factory to correct design problems. "
        "Compare red wire."
    ]


def test_the_devils_verse_keeps_its_lines(tmp_path: Path) -> None:
    put(
        tmp_path,
        "devil.dict.dz",
        "Preface\n\nHEARSE, n.  Death's\nbaby-carriage.\n\nHEAT, n.\n\n    Heat is a mode\n        Of motion.\n",
    )
    assert all_paragraphs(corpus_readers.devil(tmp_path)) == [
        "HEARSE, n. Death's baby-carriage.",
        "HEAT, n.\nHeat is a mode\nOf motion.",
    ]


def test_sayings_are_joined_unless_their_lines_are_meant_and_rude_files_are_skipped(tmp_path: Path) -> None:
    long = "A lot of the people that I know believe in positive thinking, and so\ndo I. I believe everything.\n\t\t-- Lew Col\n"
    verse = "Roses are red,\nViolets are blue,\nAnd this is a verse\n"
    put(tmp_path, "games/fortunes/wisdom", f"{long}%\n{verse}%\nShort.\n")
    put(tmp_path, "games/fortunes/drugs", long.replace("people", "dealers"))
    put(tmp_path, "games/fortunes/wisdom.dat", "index")
    assert list(corpus_readers.fortunes(tmp_path)) == [
        (
            "wisdom 00000",
            [
                "A lot of the people that I know believe in positive thinking, and so do I. I believe everything.\n-- Lew Col",
                "Roses are red,\nViolets are blue,\nAnd this is a verse",
            ],
        )
    ]


def test_a_campaign_is_told_in_its_order_without_markup_and_variables(tmp_path: Path) -> None:
    put(
        tmp_path,
        "campaigns/Heir/data/scenarios/01.cfg",
        'story= _ "The old king rode out.\nHe did not ""return""."\nid="Konrad"\nmessage= _ "<i>Run</i> for the ford!"\n'
        'message= _ "You have $gold left, my lord."\nname="Not told to anyone"\n',
    )
    assert list(corpus_readers.wesnoth(tmp_path)) == [
        ("scenarios/01.cfg", ["The old king rode out.", 'He did not "return".', "Run for the ford!"])
    ]


def test_a_mission_is_one_document_and_its_blanks_are_filled(tmp_path: Path) -> None:
    put(
        tmp_path,
        "usr/share/data/free worlds.txt",
        'mission "One"\n\tdialog\n\t\t`You are told to fly to <planet>, and to ask for Captain <last> when you are there.`\n'
        'mission "Two"\n\tdialog\n\t\t`You are given <payment> for what you have done, and you may leave when you like.`\n',
    )
    found = {name: text for name, text in corpus_readers.endless_sky(tmp_path) if text}
    assert found == {
        "free worlds.txt 0000": ["You are told to fly to Earth, and to ask for Captain Morgan when you are there."]
    }


def test_json_texts_are_taken_by_key(tmp_path: Path) -> None:
    said = "I have not seen a living soul in this town since the day that the sirens went."
    rows = [
        {"id": said, "text": [said, "<tag> " + said]},
        {"description": {"str": f"<color_red>{said}</color> So it is."}},
    ]
    put(tmp_path, "usr/share/json/npc.json", json.dumps(rows))
    assert list(corpus_readers.cataclysm(tmp_path)) == [("npc.json 000", [said, f"{said} So it is."])]


def test_monsters_are_described_after_their_names(tmp_path: Path) -> None:
    text = "%%%%\n# comment\nkobold\n\nA small creature with the look and the\ntemper of a feral dog.\n%%%%\n_key_suffix\n\nIt has been made to dance through the air on its own.\n"
    put(tmp_path, "dat/descript/monsters.txt", text)
    put(tmp_path, "dat/descript/de/monsters.txt", text)
    assert all_paragraphs(corpus_readers.crawl(tmp_path)) == [
        "kobold: A small creature with the look and the temper of a feral dog.",
        "It has been made to dance through the air on its own.",
    ]


PAGE = "This is the paragraph that a reader of the handbook came for, and it is long enough to be kept."
ITEM = "An item of a list is kept when it is as much of a sentence as the paragraphs around it are."


def test_pages_give_paragraphs_and_items_but_no_navigation_code_or_tables(tmp_path: Path) -> None:
    pytest.importorskip("lxml")
    noise = PAGE.replace("handbook", "noise")
    put(
        tmp_path,
        "en/ch1.html",
        f'<html><body><nav><p>{noise}</p></nav><div class="navheader"><p>{noise}</p></div><h1>Title</h1>'
        f"<p>{PAGE.replace('handbook', '<em>handbook</em>')}</p><pre>{noise}</pre><table><tr><td><p>{noise}</p></td></tr></table>"
        f"<ul><li><p>{ITEM}</p></li><li>short</li></ul></body></html>",
    )
    put(tmp_path, "en/empty.html", "")
    assert [row for row in corpus_readers.html(tmp_path) if row[1]] == [("en/ch1.html", [PAGE, ITEM])]


def test_help_pages_in_xml_give_their_paragraphs(tmp_path: Path) -> None:
    pytest.importorskip("lxml")
    put(
        tmp_path,
        "C/a.page",
        f'<page xmlns="http://projectmallard.org/1.0/"><info><desc>no</desc></info><p>{PAGE}</p><screen>{ITEM}</screen></page>',
    )
    put(tmp_path, "C/legal.xml", f"<p>{PAGE}</p>")
    assert list(corpus_readers.xml(tmp_path)) == [("C/a.page", [PAGE])]


def test_pod_loses_its_codes_and_its_examples(tmp_path: Path) -> None:
    put(
        tmp_path,
        "perl.pod",
        "=head1 NAME\n\nThe function X<sort>L<sort|perlfunc/sort> gives you the B<I<sorted>> list, and it does not change C<@old>"
        " at all, as you may have hoped.\n\n  my @new = sort @old;\n\n=cut\n",
    )
    assert all_paragraphs(corpus_readers.pod(tmp_path)) == [
        "The function sort gives you the sorted list, and it does not change @old at all, as you may have hoped."
    ]


# --- repeats, caps and the split ---------------------------------------------------------------------------------------


def document(name: str, *texts: str) -> Document:
    return Document(name, "novel", "package", texts or (f"The text of {name}. " * 20,))


def test_a_paragraph_stays_in_the_first_document_that_holds_it() -> None:
    shared = "This longer paragraph is printed in both of the books, as happens with a preface. " * 3
    own = "And this is what only the second of the two books has to tell to those who read it. " * 3
    seen: set[bytes] = set()
    first = without_repeats([document("a/1", shared)], seen)
    second = without_repeats([document("b/1", shared.upper(), own), document("b/2", shared)], seen)
    assert [d.paragraphs for d in first] == [(shared,)]
    assert [(d.id, d.paragraphs) for d in second] == [("b/1", (own,))]


def test_a_short_line_of_dialogue_may_come_again() -> None:
    filler = "He looked at the door for as long as it takes to say nothing at all and then some. " * 3
    kept = without_repeats([document("a/1", "Yes.", filler), document("a/2", "Yes.", filler + "Twice.")], set())
    assert [d.paragraphs[0] for d in kept] == ["Yes.", "Yes."]


def test_a_validation_paragraph_said_almost_so_in_training_is_left_out() -> None:
    said = "The quick brown fox jumps over the lazy dog and then runs far away into the dark green forest"
    train = [document("a/1", said + " of the north.")]
    echo, own = said + " of the south.", "A sentence of eight or more words that training does not hold at all."
    (kept,) = without_echoes([document("b/1", echo, own), document("b/2", echo)], train)
    assert (kept.id, kept.paragraphs) == ("b/1", (own,))


def test_a_cap_chooses_the_same_documents_whatever_their_order_and_keeps_that_order() -> None:
    documents = [document(f"a/{number}") for number in range(50)]
    cap = 10 * documents[0].size_bytes
    chosen = within_cap(documents, cap)
    assert 0 < sum(d.size_bytes for d in chosen) <= cap
    assert {d.id for d in within_cap(documents[::-1], cap)} == {d.id for d in chosen}
    assert [d.id for d in chosen] == [d.id for d in documents if d in chosen]
    assert within_cap(documents, 10**9) == documents


def test_about_one_document_in_fifty_is_held_out_and_one_at_least() -> None:
    assert 20 <= len(held_out([document(f"a/{number}") for number in range(2000)])) <= 60
    assert len(held_out([document("a/1"), document("a/2")])) == 1
    assert held_out([document("a/1")]) == set()


def test_two_translations_hold_out_the_same_chapters() -> None:
    names = [f"{number:03}" for number in range(500)]
    one, other = (
        {n.partition("/")[2] for n in held_out([document(f"{t}/{n}") for n in names])} for t in ("web", "kjv")
    )
    assert one == other


def test_every_source_has_a_name_of_its_own_and_a_least_number_of_documents() -> None:
    assert len({source.name for source in SOURCES}) == len(SOURCES)
    assert all(source.least > 0 and source.cap > 0 and source.weight > 0 and source.licence for source in SOURCES)


# --- the whole build ---------------------------------------------------------------------------------------------------


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Debian mirror of tar files; `apt-get` logs what it is asked for, `dpkg-deb` knows version 1.0 only."""
    tools, folder = tmp_path / "bin", tmp_path / "mirror"
    tools.mkdir()
    folder.mkdir()
    scripts = {
        "apt-get": f"""
            echo "$2" >> {folder}/asked
            if [ -f {folder}/says ]; then {shutil.which("cat")} {folder}/says >&2; exit 100; fi
            [ -f {folder}/$2.tar ] || {{ echo "E: Unable to locate package $2" >&2; exit 100; }}
            {shutil.which("cp")} {folder}/$2.tar "$2_1.0_all.deb"
        """,
        "dpkg-deb": f"""
            case "$1" in --field) echo 1.0 ;; --fsys-tarfile) exec {shutil.which("cat")} "$2" ;; esac
        """,
    }
    for name, script in scripts.items():
        (tools / name).write_text(f"#!/bin/sh\n{script}")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    return folder


def put_package(mirror: Path, name: str, files: dict[str, str]) -> None:
    with tarfile.open(mirror / f"{name}.tar", "w") as archive:
        for path, content in files.items():
            member = tarfile.TarInfo(f"./{path}")
            member.size = len(content.encode())
            archive.addfile(member, io.BytesIO(content.encode()))


def read_stories(folder: Path):
    for path in sorted(folder.rglob("*.txt")):
        yield path.stem, list(paragraphs(path.read_text()))


STORIES = Source("stories", ("stories-data",), "story", "public domain", ("usr/*.txt",), read_stories, least=2)
TALES = dataclasses.replace(STORIES, name="tales", packages=("tales-data",), weight=3)


@pytest.fixture
def packages(mirror: Path) -> Path:
    told = {
        f"usr/{n:02}.txt": f"This is the story with the number {n}, and it is not like the others. " * 5
        for n in range(40)
    }
    put_package(mirror, "stories-data", {**told, "usr/picture.png": "not a text", "etc/own.txt": "not asked for"})
    told = {
        f"usr/{n:02}.txt": f"Once upon a time there was a tale; it was number {n} of them all. " * 5 for n in range(20)
    }
    same = "usr/20.txt", "This is the story with the number 7, and it is not like the others. " * 5
    put_package(mirror, "tales-data", dict([*told.items(), same]))
    return mirror


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_corpus_is_three_files_and_its_manifest_says_what_is_in_them(tmp_path: Path, packages: Path) -> None:
    manifest = build(tmp_path / "corpus", tmp_path / "debs", progress=False, sources=[STORIES, TALES])
    assert {path.name for path in (tmp_path / "corpus").iterdir()} == {
        "train.jsonl",
        "validation.jsonl",
        "manifest.json",
    }
    train, validation = rows(tmp_path / "corpus/train.jsonl"), rows(tmp_path / "corpus/validation.jsonl")
    assert {tuple(row) for row in train + validation} == {("id", "kind", "source", "text")}
    assert len(train) + len(validation) == 60  # the tale that is a story too is there once
    assert {row["source"] for row in validation} == {"stories-data", "tales-data"}
    assert manifest.train["documents"] == len(train)
    assert manifest.train["file_bytes"] == (tmp_path / "corpus/train.jsonl").stat().st_size
    assert manifest.kinds == {"story": sum(len(row["text"].encode()) for row in train + validation)}
    tales = manifest.sources[1]
    assert (tales["licence"], tales["weight"], tales["documents"]) == ("public domain", 3, 20)
    assert tales["packages"][0]["version"] == "1.0" and len(tales["packages"][0]["sha256"]) == 64


def test_no_paragraph_is_in_training_and_in_validation(tmp_path: Path, packages: Path) -> None:
    build(tmp_path / "corpus", tmp_path / "debs", progress=False, sources=[STORIES, TALES])
    sides = [
        {fingerprint(text) for row in rows(tmp_path / f"corpus/{name}.jsonl") for text in row["text"].split("\n\n")}
        for name in ("train", "validation")
    ]
    assert all(sides) and not sides[0] & sides[1]


def test_a_finished_corpus_is_left_alone_and_another_recipe_uses_the_downloads(tmp_path: Path, packages: Path) -> None:
    folder = tmp_path / "corpus"
    first = build(folder, tmp_path / "debs", progress=False, sources=[STORIES])
    written = (folder / "train.jsonl").stat().st_mtime_ns
    assert build(folder, tmp_path / "debs", progress=False, sources=[STORIES]) == first
    assert (folder / "train.jsonl").stat().st_mtime_ns == written
    other = build(folder, tmp_path / "debs", progress=False, sources=[dataclasses.replace(STORIES, cap=2000)])
    assert other.recipe != first.recipe and other.train["documents"] < first.train["documents"]
    assert (packages / "asked").read_text().split() == ["stories-data"]


def test_a_corpus_that_lost_its_end_is_made_again_to_the_same_bytes(tmp_path: Path, packages: Path) -> None:
    folder = tmp_path / "corpus"
    build(folder, tmp_path / "debs", progress=False, sources=[STORIES])
    whole = (folder / "train.jsonl").read_bytes()
    (folder / "train.jsonl").write_bytes(whole[:-1])
    build(folder, tmp_path / "debs", progress=False, sources=[STORIES])
    assert (folder / "train.jsonl").read_bytes() == whole


def test_what_an_interrupted_download_left_is_fetched_again(tmp_path: Path, packages: Path) -> None:
    half = tmp_path / "debs/unfinished/stories-data_1.0_all.deb"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"half")
    package = corpus_packages.fetch("stories-data", tmp_path / "debs")
    assert package.path == tmp_path / "debs/stories-data_1.0_all.deb"
    assert package.path.stat().st_size > 4 and not half.parent.exists()


def test_only_the_files_asked_for_are_unpacked(tmp_path: Path, packages: Path) -> None:
    package = corpus_packages.fetch("stories-data", tmp_path / "debs")
    corpus_packages.unpack(package, ("usr/*.txt",), tmp_path / "out")
    assert {path.suffix for path in (tmp_path / "out").rglob("*.*")} == {".txt"}
    assert not (tmp_path / "out/etc").exists()


# --- what can go wrong -------------------------------------------------------------------------------------------------


def built(tmp_path: Path, *sources: Source):
    return build(tmp_path / "corpus", tmp_path / "debs", progress=False, sources=sources)


def test_a_machine_without_apt_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoApt, match=r"no apt-get on this machine.*stories-data.*Debian 12"):
        built(tmp_path, STORIES)


def test_a_missing_package_is_named_with_the_command_that_helps(tmp_path: Path, mirror: Path) -> None:
    with pytest.raises(MissingPackage) as caught:
        built(tmp_path, STORIES)
    assert "stories-data" in str(caught.value) and "Unable to locate package" in str(caught.value)
    assert "apt-get update" in str(caught.value)
    assert isinstance(caught.value, CorpusError)


def test_a_download_on_a_full_disk_names_the_folder(tmp_path: Path, packages: Path) -> None:
    (packages / "says").write_text("E: Write error - write (28: No space left on device)\n")
    with pytest.raises(NoRoom, match="no room in .*debs for the package stories-data") as caught:
        built(tmp_path, STORIES)
    assert isinstance(caught.value, OSError) and caught.value.errno == errno.ENOSPC
    assert not list((tmp_path / "debs").glob("*.deb"))


def test_a_damaged_package_is_named(tmp_path: Path, packages: Path) -> None:
    (packages / "stories-data.tar").write_bytes(b"no archive" * 100)
    with pytest.raises(
        UnreadablePackage, match="stories-data_1.0_all.deb is no readable Debian package.*delete the file"
    ):
        built(tmp_path, STORIES)


def test_a_missing_library_is_named_with_what_it_reads(tmp_path: Path, packages: Path) -> None:
    def reader(folder: Path):
        raise ModuleNotFoundError("No module named 'rdata'", name="rdata")
        yield

    with pytest.raises(MissingReader, match=r"stories is read with the Python library rdata: pip install"):
        built(tmp_path, dataclasses.replace(STORIES, reader=reader))


def test_a_package_with_less_in_it_than_before_is_refused_by_name(tmp_path: Path, packages: Path) -> None:
    built(tmp_path, STORIES)
    before = (tmp_path / "corpus/manifest.json").read_bytes()
    with pytest.raises(TooFewDocuments, match=r"tales: 21 documents in tales-data 1\.0, at least 30 expected"):
        built(tmp_path, STORIES, dataclasses.replace(TALES, least=30))
    assert (tmp_path / "corpus/manifest.json").read_bytes() == before
    assert not [path for path in (tmp_path / "debs").iterdir() if path.is_dir()]


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_full_disk_is_named_with_the_bytes_needed_and_the_old_corpus_stays(
    tmp_path: Path, packages: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    built(tmp_path, STORIES)
    before = {path.name: path.read_bytes() for path in (tmp_path / "corpus").iterdir()}
    if when == "before":
        monkeypatch.setattr(corpus.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=1000))
    else:

        def write_bytes(path: Path, content: bytes) -> int:
            with path.open("wb") as file:
                file.write(content[:10])
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(NoRoom, match=r"no room in .*corpus for the corpus, which needs [\d,]+ bytes") as caught:
        built(tmp_path, STORIES, TALES)
    assert caught.value.errno == errno.ENOSPC
    assert {path.name: path.read_bytes() for path in (tmp_path / "corpus").iterdir()} == before
