"""Pictures and histograms in `trainer.log`: kept, shown, handed on, and not twice after a resume."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launching import train_basics
from PIL import Image as Pillow

from paceline.base.journal import read_journal
from paceline.errors import UsageError
from paceline.observe.media import Histogram, Image, medium

BODY = """
import io, torch, paceline
class Five:
    def write(self, step, values): open(f"told-{paceline_main}", "a").write(f"{step} {sorted(values)}\\n")
    def media(self, step, name, told): open(f"told-{paceline_main}", "a").write(f"{step} {name} {told['kind']}\\n")
t = make()
paceline_main = t.main
t.log_to(Five())
for report in t.steps(data, count=6):
    picture = torch.zeros(3, 4, 5); picture[0] = report.step / 6
    t.log(weights=next(t.model.parameters()).detach().flatten(), accuracy=0.5)
    t.log(**{"a </script><img onerror=1>/picture": picture})
    if report.step == 3 and FIRST:
        t.save(); raise SystemExit(3)
"""


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3, 4]), st.integers(0, 2**32 - 1))
def test_a_picture_is_read_back_by_another_library(height: int, width: int, channels: int, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    expected = pixels[..., 0] if channels == 1 else pixels
    for given_ in (pixels, torch.from_numpy(pixels).permute(2, 0, 1), pixels / 255, Pillow.fromarray(expected)):
        made = Image(given_)
        assert (made.width, made.height) == (width, height)
        np.testing.assert_array_equal(np.asarray(Pillow.open(io.BytesIO(made.png))), expected)
    assert Image(made.png).png == made.png


@given(st.lists(st.floats(width=32), max_size=60), st.integers(1, 40))
def test_a_histogram_is_numpys(values: list[float], bins: int) -> None:
    every = np.array(values, dtype=np.float64)
    finite = every[np.isfinite(every)]
    made = Histogram(torch.tensor(values), bins)
    try:
        counts, edges = np.histogram(finite, bins)
    except ValueError:
        counts, edges = np.array([len(finite)]), np.array([finite.min(), finite.max()])
    assert (made.counts, made.edges) == (counts.tolist(), edges.tolist())
    assert sum(made.counts) + made.others == len(values)


class Figure:
    """As matplotlib's."""

    def savefig(self, file: Any, **form: str) -> None:
        Pillow.new("RGB", (7, 3), "red").save(file, form["format"])


def test_what_a_value_is_taken_for() -> None:
    for value in (2, 0.5, "text", True, torch.tensor(2.5), np.float32(1), np.ones((1, 1))):
        assert medium("x", value) is None
    for value in (torch.ones(5), np.arange(4), Histogram(np.ones((3, 3)))):
        assert isinstance(medium("x", value), Histogram)
    for value in (torch.ones(3, 5, 5), np.ones((5, 5, 3)), np.ones((5, 6)), Figure(), Pillow.new("L", (2, 2))):
        assert isinstance(medium("x", value), Image)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: medium("x", torch.ones(2, 5, 5, 5)),
            "log() got x of shape (2, 5, 5, 5), which is neither a vector of numbers nor an image; "
            "use trainer.log(x=paceline.Histogram(...)) or paceline.Image(...)",
        ),
        (
            lambda: Image(torch.ones(5, 5, 3)),
            "an Image cannot be made from a Tensor of shape (5, 5, 3); "
            "use the shape [height, width], or [channels, height, width] with 1, 3 or 4 channels",
        ),
        (
            lambda: Image(np.ones((5, 5), dtype=np.int64)),
            "an Image cannot have the dtype int64; use uint8, or floating-point numbers from 0 to 1",
        ),
        (
            lambda: Image(b"GIF89a"),
            "the bytes of an Image are not a PNG file; pass an array, or the bytes of a PNG file",
        ),
        (
            lambda: Histogram(["a"]),
            "a Histogram needs numbers, got an array of dtype <U1; convert the values to numbers",
        ),
        (lambda: Histogram([1.0], bins=0), "a Histogram cannot have 0 bins; set bins= to a number from 1 to 1000"),
    ],
)
def test_what_is_none(make: Any, text: str) -> None:
    with pytest.raises(UsageError) as raised:
        make()
    assert str(raised.value) == text


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    """The second attempt begins at step 3; worker 0 alone writes."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, code in ((True, 3), (False, 0)):
        train_basics(tmp_path, BODY.replace("FIRST", str(first)), 2, "--tensorboard", code=code)
    run = tmp_path / "out"
    name = "a </script><img onerror=1>/picture"
    media = [event for event in read_journal(run) if event["event"] == "media"]
    assert [event["step"] for event in media if event["kind"] == "image"] == [1, 2, 3, 4, 5, 6]
    assert {event["name"] for event in media} == {"weights", name}
    last = media[-1]
    pixels = np.asarray(Pillow.open(run / last["file"]))
    assert pixels.shape == (4, 5, 3)
    assert (pixels == [255, 0, 0]).all()
    assert len(list((run / "media").iterdir())) == 6
    assert {path.stat().st_mode & 0o777 for path in (run / "media").iterdir()} == {0o600}

    html = (run / "report.html").read_text()
    assert "<img onerror" not in html
    (shown,) = re.findall(r'src="data:image/png;base64,([^"]+)"', html)
    assert base64.b64decode(shown) == (run / last["file"]).read_bytes()
    assert "weights: 160 values from" in html

    told = (tmp_path / "told-True").read_text().splitlines()
    assert not (tmp_path / "told-False").exists()
    images = [line for line in told if line.endswith("image")]  # what came after the checkpoint again, as with figures
    assert list(dict.fromkeys(images)) == [f"{step} {name} image" for step in (1, 2, 3, 4, 5, 6)]

    read = EventAccumulator(str(run / "tensorboard"), size_guidance={"images": 0, "histograms": 0}).Reload()
    assert [one.step for one in read.Images(name)] == [1, 2, 3, 4, 5, 6]
    assert read.Images(name)[-1].encoded_image_string == (run / last["file"]).read_bytes()
    histograms = read.Histograms("weights")
    assert [one.step for one in histograms] == [1, 2, 3, 4, 5, 6]
    assert histograms[-1].histogram_value.num == 160
