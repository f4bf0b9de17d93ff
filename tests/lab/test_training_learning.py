"""Every experiment's small preset learns: its learner ends below the bound that the preset states."""

import pytest
import torch
from regard_lab import training
from regard_lab.training import loop
from regard_lab.training.results import collect
from regard_lab.training.trials import pairs, text

pytestmark = pytest.mark.usefixtures("one_thread")


SLOW = (
    "retrieval-trained",
    "variants",
    "variants-length",
    "variants-recall",
    "variants-translation",
)  # models of others in this list


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in training.names()]
)
def test_the_small_preset_learns(name, tmp_path):
    experiment = training.get(name)
    plan = experiment.presets["small"]
    record = loop.run(experiment, "small", plan.learner, 0, tmp_path)
    assert not record["diverged"]
    start = record["history"][0]
    for metric, bound in plan.learns.items():
        assert record["final"][metric] < bound, f"{metric} of {name} ended at {record['final'][metric]}"
        assert start[metric] > bound  # the bound says something: an untrained model misses it
    for figure in experiment.figures(collect(experiment, "small", [record])).values():
        assert len(figure.alt) > 20


def test_made_up_text_has_names_that_return():
    line = text.generate(50, seed=3).splitlines()[7]
    town = line.split(" of ")[1].split()[0]
    assert line.count(town) == 2 and text.generate(50, seed=3) != text.generate(50, seed=4)


def test_text_that_is_too_short_is_refused(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("to be")
    with pytest.raises(ValueError, match="has 5 characters, too few to train on; give 4096 or more"):
        text.split_text(path)


def test_windows_are_pieces_of_the_text():
    ids = torch.arange(100)
    found = text.draw_windows(ids, 5, 8, torch.Generator().manual_seed(0))
    assert found.shape == (5, 9) and torch.equal(found - found[:, :1], torch.arange(9).expand(5, 9))


@pytest.fixture
def folder(tmp_path):
    for part in ("train", "val", "test_x"):
        (tmp_path / f"{part}.de").write_text("ein hund .\nein hund\n")
        (tmp_path / f"{part}.en").write_text("a dog .\na dog\n")
    return tmp_path


def test_a_folder_of_pairs(folder):
    found = pairs.corpus(folder)
    assert found.test == [("ein hund .", "a dog ."), ("ein hund", "a dog")]
    assert found.target.words == ("", "", "", "<unk>", "a", "dog")  # "." stands there once
    ids = found.target.encode("a cat")
    assert ids == [pairs.BEGIN, 4, pairs.UNKNOWN, pairs.END] and found.target.decode([*ids, 5]) == "a <unk>"
    source, target = found.tensors(found.val, 4)
    assert source.shape == (2, 4) and target.shape == (2, 5) and target[1, -1] == pairs.PAD


def test_a_folder_that_lacks_a_part_or_a_line_is_refused(folder):
    (folder / "val.en").write_text("a dog .\n")
    with pytest.raises(ValueError, match=r"val.de has 2 lines, .en 1"):
        pairs.corpus(folder)
    (folder / "val.en").unlink()
    with pytest.raises(ValueError, match=r"must be a folder with a file val.en, one sentence a line"):
        pairs.corpus(folder)


def test_greedy_is_the_likeliest_word_each_time():
    """Padding behind a position changes nothing before it, so that decoding at full length is decoding a prefix."""
    from regard_lab.training.trials.translation import Translator

    torch.manual_seed(0)
    model = Translator(10, 12, layers=1, heads=2, width=16, length=7, dropout=0.0, attention={}).eval()
    source = torch.randint(4, 10, (3, 7))
    with torch.no_grad():
        out = model.greedy(source, 7)
        for row, ids in zip(source, out.tolist(), strict=True):
            end = ids.index(pairs.END) if pairs.END in ids else 6
            for i in range(1, end + 1):
                assert int(model(row[None], torch.tensor([ids[:i]]))[0, -1].argmax()) == ids[i]
