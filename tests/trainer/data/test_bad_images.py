"""Hostile images: every one is accounted for, no worker dies, and what is skipped moves nothing else."""

from __future__ import annotations

import gc
import itertools
import weakref
from pathlib import Path
from typing import Any

import data_sets
import numpy as np
import pytest
from data_sets import encoded, fingerprint, png, reading, samples
from PIL import Image

from playbook.errors import DataError
from playbook_trainer.config.tree import TrainerConfig
from playbook_trainer.data.batch import IGNORE, Batch
from playbook_trainer.data.images import BAD_KINDS, BadImage, ImageDecoder, ImageRef, decode, header_size
from playbook_trainer.data.sources.shards import Encoded

MUTATED = 1000


def config(folder: Path, **overrides: Any) -> TrainerConfig:
    return data_sets.config(data_sets.VL, **{"data__path": str(folder), "data__seq_len": 64, "data__on_bad_image": "skip", **overrides})


def noise(mode: str = "RGB", kind: str = "JPEG", size: tuple[int, int] = (40, 36), seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return encoded(Image.fromarray(pixels).convert(mode), kind)


def sixteen_bit(value: int) -> bytes:
    return encoded(Image.fromarray(np.full((36, 40), value, dtype=np.uint16)), "PNG")


def animated(kind: str) -> bytes:
    first, *others = (Image.new("RGB", (40, 36), (60 * i, 0, 0)) for i in range(3))
    return encoded(first, kind, save_all=True, append_images=others)


def mutated(number: int) -> bytes:
    """One of a dozen ways in which an image is unusual or broken."""
    rng = np.random.default_rng(number)
    plain = noise(seed=number, kind=("JPEG", "PNG", "WEBP")[number // 12 % 3])
    ways = (
        lambda: plain,
        lambda: plain[: int(rng.integers(0, len(plain)))],
        lambda: bytes(rng.integers(0, 256, 16, dtype=np.uint8)) + plain[16:],
        lambda: plain[:60] + bytes(b ^ int(rng.integers(0, 256)) if rng.random() < 0.02 else b for b in plain[60:]),
        lambda: noise("CMYK", seed=number),
        lambda: sixteen_bit(number * 60),
        lambda: animated(("GIF", "PNG", "WEBP")[number // 12 % 3]),
        lambda: b"",
        lambda: png(*((8000, 6250), (0, 40), (60_000, 60_000))[number // 12 % 3]),
        lambda: rng.bytes(int(rng.integers(1, 400))),
        lambda: noise("L", seed=number),
        lambda: noise("P", "PNG", seed=number),
    )
    return ways[number % len(ways)]()


def write_samples(folder: Path, images: list[bytes]) -> Path:
    names = [f"{n:04d}.jpg" for n in range(len(images))]
    lines = [{"images": [name], "question": f"{n}?", "answer": "yes"} for n, name in enumerate(names)]
    return samples(folder, lines, dict(zip(names, images, strict=True)))


def run(cfg: TrainerConfig, steps: int, **options: Any) -> tuple[list[Batch], dict[str, int]]:
    with reading(cfg, **options) as loader:
        return [b for step in itertools.islice(loader, steps) for b in step], loader.counters()


@pytest.mark.timeout(1200)
@pytest.mark.full
def test_a_thousand_mutated_images_pass_and_every_one_is_accounted_for(tmp_path: Path) -> None:
    folder = write_samples(tmp_path / "set", [mutated(n) for n in range(MUTATED)])
    options = {"data__pack": False, "train__global_batch_size": 20, "train__micro_batch_size": 20, "data__max_source_pixels": 40_000_000}
    sums: dict[str, int] = {}
    for split, rows in (("train", 900), ("eval", 100)):
        batches, counters = run(config(folder, data__num_workers=3, **options), rows // 20, split=split)
        assert sum(b.num_images for b in batches) == rows
        sums = {name: sums.get(name, 0) + count for name, count in counters.items()}
    bad = {kind: sums[f"bad_images_{kind}"] for kind in BAD_KINDS}
    print(f"{sums['images_decoded']} decoded, bad: {bad}")
    assert sums["images_decoded"] + sum(bad.values()) == MUTATED
    assert all(bad[kind] > 20 for kind in BAD_KINDS if kind != "missing")
    # Plain, CMYK, 16-bit, grey and palette images are images.
    assert sums["images_decoded"] >= MUTATED * 5 // 12 - 5


def test_cmyk_and_sixteen_bits_are_converted(tmp_path: Path) -> None:
    (tmp_path / "deep.png").write_bytes(sixteen_bit(0x8040))
    assert (decode(ImageRef(tmp_path / "deep.png", 32, 32)) == 0x80).all()
    Image.new("CMYK", (40, 36), (0, 255, 255, 0)).save(tmp_path / "red.jpg", quality=95)
    assert decode(ImageRef(tmp_path / "red.jpg", 32, 32))[0, 0].tolist() == pytest.approx([255, 0, 0], abs=6)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "empty"),
        (b"hello", "not_an_image"),
        (animated("PNG"), "animated"),
        (animated("WEBP"), "animated"),
        (animated("GIF"), "not_an_image"),
        (noise(kind="BMP"), "not_an_image"),
        (png(9000, 9000), "too_large"),
        (png(60_000, 60_000), "too_large"),
    ],
)
def test_a_bad_header_has_a_kind(tmp_path: Path, data: bytes, kind: str) -> None:
    (tmp_path / "x.jpg").write_bytes(data)
    with pytest.raises(BadImage, match=r"x\.jpg") as caught:
        header_size(tmp_path / "x.jpg")
    assert caught.value.kind == kind


def test_a_file_that_goes_away_is_missing(tmp_path: Path) -> None:
    with pytest.raises(BadImage) as caught:
        decode(ImageRef(tmp_path / "gone.jpg", 32, 32))
    assert caught.value.kind == "missing"


@pytest.mark.full
def test_fifty_megapixels_are_decoded_where_allowed_and_refused_where_not(tmp_path: Path) -> None:
    Image.new("L", (8000, 6250), 77).save(tmp_path / "large.png")
    assert (decode(ImageRef(tmp_path / "large.png", 32, 32)) == 77).all()
    with pytest.raises(BadImage) as caught:
        decode(ImageRef(tmp_path / "large.png", 32, 32), max_pixels=40_000_000)
    assert caught.value.kind == "too_large"


def broken_set(folder: Path) -> Path:
    """Twenty samples; the pixels of the fifth and the header of the eighth are broken."""
    images = [noise(seed=n, size=(64, 64)) for n in range(20)]
    images[4] = images[4][: len(images[4]) // 2]
    images[7] = b"no image"
    return write_samples(folder, images)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_skipped_image_is_grey_bears_no_loss_and_moves_no_other_sample(tmp_path: Path, workers: int) -> None:
    options = {"data__pack": False, "train__global_batch_size": 1, "data__num_workers": workers}
    broken, counters = run(config(broken_set(tmp_path / "a"), **options), 18)
    sound, _ = run(config(write_samples(tmp_path / "b", [noise(seed=n, size=(64, 64)) for n in range(20)]), **options), 18)
    assert counters["bad_images_undecodable"] == counters["bad_images_not_an_image"] == 1
    assert counters["images_decoded"] == 16
    for a, b in zip(broken, sound, strict=True):
        text = bytes(t for t in b.tokens_N.tolist() if t < 256)
        if text not in (b"4?yes", b"7?yes"):
            assert fingerprint(a) == fingerprint(b)
            continue
        assert bytes(t for t in a.tokens_N.tolist() if t < 256) == text, "the sample keeps its place"
        assert (a.labels_N == IGNORE).all()
        assert a.num_loss == 0
        assert a.vision is not None
        assert float(a.vision.pixels_PC.abs().max()) < 0.01, "grey"
        assert len(a.vision.pixels_PC) == 4 * int((a.tokens_N == 258).sum())


def test_a_bad_image_silences_its_own_sample_alone(tmp_path: Path) -> None:
    batches, _ = run(config(broken_set(tmp_path / "a"), data__seq_len=256, train__global_batch_size=1), 4)
    seen = 0
    for batch in batches:
        cu = batch.cu_seqlens.tolist()
        for a, b in itertools.pairwise(cu):
            text = bytes(t for t in batch.tokens_N[a:b].tolist() if t < 256)
            if text:
                assert bool((batch.labels_N[a:b] != IGNORE).any()) == (text not in (b"4?yes", b"7?yes"))
                seen += text in (b"4?yes", b"7?yes")
    assert seen >= 2


@pytest.mark.parametrize("workers", [0, 2])
def test_failing_names_the_file(tmp_path: Path, workers: int) -> None:
    cfg = config(broken_set(tmp_path / "a"), data__on_bad_image="fail", data__num_workers=workers)
    with pytest.raises(DataError, match=r"000[47]\.jpg.*on_bad_image=skip") as caught:
        run(cfg, 40)
    assert "Traceback" not in str(caught.value)


def test_the_cache_holds_pixels_and_no_encoded_images(tmp_path: Path) -> None:
    decoder = ImageDecoder(config(tmp_path, data__cache="memory").data)

    def image() -> Encoded:
        return Encoded("a.parquet: row group 0, row 0, image 0", noise())

    first = image()
    gone = weakref.ref(first)
    pixels, _ = decoder.pixels(ImageRef(first, 32, 32))
    del first
    gc.collect()
    assert gone() is None
    assert np.array_equal(decoder.pixels(ImageRef(image(), 32, 32))[0], pixels)
    assert decoder.take_counts() == {"images_decoded": 1, "images_cached": 1}


@pytest.mark.full
def test_the_cache_changes_no_pixel_and_decodes_each_image_once(tmp_path: Path) -> None:
    overrides = {"data__path": None, "data__seq_len": 128, "data__num_workers": 1, "data__max_image_pixels": 8192}
    plain, without = run(config(tmp_path, **overrides), 20)
    cached, counters = run(config(tmp_path, **overrides, data__cache="memory"), 20)
    assert [*map(fingerprint, cached)] == [*map(fingerprint, plain)]
    assert without["images_cached"] == 0
    assert counters["images_decoded"] < without["images_decoded"] // 2
    assert counters["images_decoded"] + counters["images_cached"] == without["images_decoded"]
    _, small = run(config(tmp_path, **overrides, data__cache="memory", data__cache_gib=1e-4), 20)
    assert small["images_decoded"] > counters["images_decoded"], "a full cache takes no more"
